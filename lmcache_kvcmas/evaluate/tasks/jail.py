"""What runs inside the sandbox: a checker, and a candidate that it may only call. Started by ``sandbox``, by its path.

The checker holds the checks and a secret; the candidate, forked before either was read, holds the untrusted program.
Between them go literals alone (``repr`` there, ``ast.literal_eval`` here), so no object of the candidate's can claim
to be equal to what is expected, and nothing that the candidate prints, raises or exits with can pass for success: that
is the secret on the checker's output, which it writes after the last check has passed. Standard library only.
"""

import ast
import json
import os
import resource
import struct
import sys
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

_NOBODY = 65534
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION_3 = 0x20080522
_REPLY_BYTES = 1 << 20
_FILE_BYTES = 1 << 20
_OPEN_FILES = 16

_ALLOWED = frozenset(
    (
        *("import", "compile", "exec", "marshal.load", "marshal.loads", "pickle.find_class", "array.__new__"),
        *("object.__getattr__", "builtins.id", "time.sleep", "sys._getframe", "sys._getframemodulename"),
        *("sys.excepthook", "sys.unraisablehook"),
    )
)
"""Audit events of a function that computes. ``open`` and what an import lists are looked at; all others are refused."""
_NOT_AUDITED = ("mkfifo", "mknod", "openpty", "pidfd_open", "pidfd_send_signal", "setns", "setpriority", "unshare")


def _c_library() -> Any:
    import ctypes

    return ctypes.CDLL(None)


def _prctl(option: int, value: int) -> None:
    """Where the platform has it: a layer more, never the only one."""
    with suppress(ImportError, AttributeError, OSError):
        _c_library().prctl(option, value, 0, 0, 0)


def _drop_capabilities() -> None:
    """What is left to root where it cannot become another user."""
    with suppress(ImportError, AttributeError, OSError):
        header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
        _c_library().capset(header, bytes(24))


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _others_may_read(path: str) -> bool:
    """Whether another user reaches ``path``: without that, a program that drops its rights could import nothing."""
    while True:
        if not os.stat(path).st_mode & 0o001:
            return False
        if path == os.path.dirname(path):
            return True
        path = os.path.dirname(path)


def _drop_rights() -> None:
    """No new processes, no rights beyond a plain user's, and an end with the checker's."""
    if os.getuid() == 0:
        if all(_others_may_read(folder) for folder in sys.path if os.path.isdir(folder)):
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        else:
            _drop_capabilities()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    _prctl(_PR_SET_PDEATHSIG, 9)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _guard() -> None:
    """Refuse, for good, what a function that answers questions has no need of.

    The hook uses nothing that a program could replace: no global, no builtin and no library function by its name.
    """
    for module in (sys.modules[name] for name in ("os", "posix", "_signal")):
        for name in _NOT_AUDITED:
            if hasattr(module, name):
                delattr(module, name)
    here = os.path.realpath(os.getcwd()) + os.sep
    library = tuple(prefix for path in sys.path for prefix in (path + os.sep, os.path.realpath(path) + os.sep))
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(
        event: str,
        arguments: tuple[Any, ...],
        allowed: frozenset[str] = _ALLOWED,
        library: tuple[str, ...] = library,
        here: str = here,
        code: tuple[str, ...] = (".py", ".pyc", ".so"),
        writing: int = writing,
        kind: type = type,
        text: type = str,
        number: type = int,
        error: type[Exception] = PermissionError,
    ) -> None:
        if event in allowed:
            return
        path: Any = arguments[0] if arguments else None
        if kind(path) is text and "/.." not in path and path[:2] != "..":
            own = path[:1] != "/" or path.startswith(here)
            if event == "open" and (
                own or (path.startswith(library) and path.endswith(code) and not arguments[2] & writing)
            ):
                return
            if (event == "os.listdir" or event == "os.scandir") and (own or (path + "/").startswith(library)):
                return
        if event == "open" and kind(path) is number:
            return
        raise error(f"the sandbox does not allow {event}")

    sys.addaudithook(hook)


def _candidate(calls: BinaryIO, replies: BinaryIO) -> NoReturn:
    """Run the program, then answer calls of one of its functions until there are no more. Never returns."""
    try:
        setup = json.loads(calls.readline())
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        _drop_rights()
        _guard()
        scope: dict[str, Any] = {"__name__": "candidate"}
        exec(compile(setup["program"], "candidate", "exec"), scope)
        function = scope[setup["entry_point"]]
        for line in calls:
            arguments, named = ast.literal_eval(line.decode())
            replies.write(repr(function(*arguments, **named)).encode() + b"\n")
            replies.flush()
    except BaseException:  # whatever it is, the checker sees that no reply came
        os._exit(1)
    os._exit(0)


def _check(task: dict[str, Any], calls: BinaryIO, replies: BinaryIO) -> None:
    """Run the checks. Raises whatever they raise, and RuntimeError when the candidate does not answer."""

    def call(*arguments: object, **named: object) -> object:
        calls.write(repr((arguments, named)).encode() + b"\n")
        calls.flush()
        reply = replies.readline(_REPLY_BYTES)
        if not reply.endswith(b"\n"):
            raise RuntimeError("the candidate gave no answer")
        return ast.literal_eval(reply.decode())

    scope: dict[str, Any] = {"__name__": "checks"}
    exec(compile(task["prelude"], "prelude", "exec"), scope)
    scope[task["entry_point"]] = call  # checks may name it
    exec(compile(task["checks"], "checks", "exec"), scope)
    scope["check"](call)


def main(cpu_seconds: int, memory_bytes: int) -> None:
    _limit(cpu_seconds, memory_bytes)
    calls, replies = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(calls[1])
        os.close(replies[0])
        _candidate(os.fdopen(calls[0], "rb"), os.fdopen(replies[1], "wb"))
    _prctl(_PR_SET_DUMPABLE, 0)  # its memory, which will hold the secret, is not the candidate's to read
    os.close(calls[0])
    os.close(replies[1])
    to, back = os.fdopen(calls[1], "wb"), os.fdopen(replies[0], "rb")
    task = json.loads(sys.stdin.readline())
    to.write(json.dumps({key: task[key] for key in ("program", "entry_point")}).encode() + b"\n")
    to.flush()
    _check(task, to, back)
    os.write(1, task["secret"].encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
