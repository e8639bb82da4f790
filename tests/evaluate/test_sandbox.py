"""A program that a model wrote must not hurt the user's machine, and must not be able to claim that it is right."""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from lmcache_kvcmas.evaluate.tasks import sandbox
from lmcache_kvcmas.evaluate.tasks.sandbox import Checked, Limits, passes

QUICK = Limits(wall_seconds=5.0, cpu_seconds=1)
CHECKS = "def check(candidate):\n    assert candidate(20) == 21\n    assert candidate(-1) == 0\n"
RIGHT = "def f(x):\n    return x + 1\n"


@pytest.fixture(params=["namespaces", "limits alone"], autouse=True)
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All attacks, also where the system permits no namespaces."""
    if request.param == "limits alone":
        monkeypatch.setattr(sandbox, "_namespaces", lambda: ())


def judged(program: str, limits: Limits = QUICK) -> bool:
    return passes(Checked(program, "f", CHECKS), limits)


def in_f(*lines: str) -> str:
    """A function whose result is right once it has done something else."""
    return "def f(x):\n" + "".join(f"    {line}\n" for line in lines) + "    return x + 1\n"


def test_a_right_program_passes_and_a_wrong_one_does_not() -> None:
    assert judged(RIGHT)
    assert not judged("def f(x):\n    return x\n")
    assert not judged("def g(x):\n    return x + 1\n")
    assert not judged("def f(x)\n")


def test_the_standard_library_and_the_prelude_are_there() -> None:
    program = "import math, re, collections, itertools, functools, heapq, hashlib, string\n" + RIGHT
    assert judged(program)
    checks = "def check(candidate):\n    assert double(candidate(1)) == 4\n"
    assert passes(Checked(RIGHT, "f", checks, prelude="def double(x):\n    return 2 * x\n"), QUICK)


def test_results_keep_their_types() -> None:
    checks = (
        "def check(candidate):\n    assert candidate([1, (2, 'x')], k={'a': None}) == ([1, (2, 'x')], {'a': None})\n"
    )
    assert passes(Checked("def f(x, k):\n    return x, k\n", "f", checks), QUICK)


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        in_f("raise SystemExit(0)"),
        in_f("import os; os._exit(0)").replace("x + 1", "None"),
        "def f(x):\n    import sys; sys.stdout.write('passed'); sys.stdout.flush(); return None\n",
        # Something that says it is equal to anything.
        "class Yes:\n    def __eq__(self, other): return True\ndef f(x): return Yes()\n",
        "class Yes(int):\n    def __eq__(self, other): return True\ndef f(x): return Yes(7)\n",
        # The checks and the secret, if they were anywhere to be found.
        "import sys, gc\ndef f(x):\n"
        "    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'secret' in o: sys.__stdout__.write(o['secret'])\n"
        "    return None\n",
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        if 'task' in frame.f_locals: return 21\n        frame = frame.f_back\n    return None\n",
        "import os\ndef f(x):\n    os.write(1, os.read(0, 9999) or b'x' * 64)\n    return None\n",
        # The checker's memory.
        "import os\ndef f(x):\n    m = open(f'/proc/{os.getppid()}/mem', 'rb')\n    return None\n",
        # A reply for every call, before any was made, on whatever is open.
        "import os\nfor fd in range(3, 16):\n    try: os.write(fd, b'999\\n999\\n')\n    except OSError: pass\n"
        "def f(x): return None\n",
        # Text that the checker would run, were it not a literal.
        "class R:\n    def __repr__(self): return '__import__(\"os\")._exit(0)'\ndef f(x): return R()\n",
        "class R:\n    def __repr__(self): return '(' * 100000\ndef f(x): return R()\n",
    ],
)
def test_success_cannot_be_faked(program: str) -> None:
    assert not judged(program)


@pytest.mark.parametrize(
    "program", ["while True: pass", in_f("while True: pass"), in_f("import time; time.sleep(600)")]
)
def test_what_does_not_end_is_ended(program: str) -> None:
    start = time.monotonic()
    assert not judged(program, Limits(wall_seconds=2.0, cpu_seconds=1))
    assert time.monotonic() - start < 5


def test_a_fork_bomb_gets_no_second_process(tmp_path: Path) -> None:
    before = _processes()
    assert not judged(in_f("import os", "while True: os.fork()"))
    assert not judged(in_f("import subprocess", "subprocess.run(['true'])"))
    assert not judged(in_f("import multiprocessing as m", "p = m.Process(target=print)", "p.start()"))
    time.sleep(0.2)
    assert not _processes() - before


def test_a_memory_hog_is_refused() -> None:
    assert not judged(in_f("x = len(bytearray(2 << 30))"))
    assert not judged(in_f("hog = []", "while True: hog.append('x' * (1 << 20))"))


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    target, precious = tmp_path / "new", tmp_path / "precious"
    precious.write_text("mine")
    os.chmod(precious, 0o666)
    for line in (
        f"open({str(target)!r}, 'w').write('x')",
        f"import os; os.open({str(target)!r}, os.O_CREAT | os.O_WRONLY)",
        f"import os; os.remove({str(precious)!r})",
        f"import os; os.rename({str(precious)!r}, {str(target)!r})",
        f"import os; os.truncate({str(precious)!r}, 0)",
        f"import os; os.mkdir({str(target)!r})",
        "import os; os.symlink('/etc', 'here'); open('here/x', 'w')",
        f"import pathlib; pathlib.Path({str(precious)!r}).write_text('gone')",
    ):
        assert not judged(in_f(line)), line
        assert not target.exists()
        assert precious.read_text() == "mine"
    assert judged(in_f("open('scratch', 'w').write('x')"))
    assert not judged(in_f("open('scratch', 'wb').write(b'x' * (8 << 20))"))


def test_secrets_of_the_user_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "s3cret")
    assert judged(in_f("import os", "if 'API_KEY' in os.environ: x = 99"))
    key = tmp_path / "key"
    key.write_text("s3cret")
    for path in (str(key), "/etc/passwd", f"/proc/{os.getpid()}/environ", "/proc/self/environ"):
        assert not judged(in_f(f"open({path!r}).read()")), path


def test_there_is_no_network() -> None:
    heard: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(1.0)

        def listen() -> None:
            try:
                heard.append(server.accept())
            except TimeoutError:
                return

        listener = threading.Thread(target=listen)
        listener.start()
        address = server.getsockname()
        assert not judged(in_f("import socket", f"socket.create_connection({address!r}, 1)"))
        assert not judged(in_f("import _socket", "s = _socket.socket()", f"s.connect({address!r})"))
        listener.join()
    assert not heard


def test_a_flood_of_output_goes_nowhere() -> None:
    assert judged(in_f("print('x' * (1 << 20))"))
    assert not judged(in_f("while True: print('x' * (1 << 20))"))
    assert not judged("def f(x):\n    return 'x' * (1 << 24)\n")


def test_the_guard_cannot_be_taken_off() -> None:
    assert not judged(in_f("import ctypes", "ctypes.CDLL(None).getpid()"))
    assert not judged(in_f("import resource", "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))"))
    for trick in (
        "import sys; sys.addaudithook(lambda *a: None)",
        "import builtins; builtins.isinstance = builtins.any = lambda *a: True; builtins.type = lambda x: str",
        "import os; os.path.realpath = os.fsdecode = lambda p: os.getcwd()",
        "import __main__; __main__._ALLOWED = {'open'}; __main__._guard = None",
        "import gc; [f for f in gc.get_objects() if getattr(f, '__name__', '') == 'hook'][0].__defaults__ = ()",
        "import os; os.chdir('/')",
        "import posix; posix.chdir('/')",
    ):
        assert not judged(in_f("try:", f"    {trick}", "except BaseException: pass", "open('/etc/passwd')")), trick
    assert not judged(in_f("class P(str): startswith = lambda *a: True", "open(P('/etc/passwd'))"))
    assert not judged(in_f("import pathlib", "pathlib.Path('../../etc/passwd').read_text()"))
    assert not judged(in_f("import os", "os.mkfifo('/tmp/x')"))
    assert not judged(in_f("import os", "os.open(os.path.dirname(os.__file__), os.O_RDONLY)"))


def test_the_interpreter_is_not_changed_by_a_program() -> None:
    assert not judged("import sys\nsys.exit = None\nimport builtins\nbuiltins.len = None\n")
    assert callable(sys.exit)
    assert len("x") == 1


def _processes() -> set[str]:
    """Running processes of the sandbox, by id."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"jail.py" in path.read_bytes():
                found.add(path.parent.name)
        except OSError:
            continue
    return found
