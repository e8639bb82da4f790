"""Programs that a model wrote, run where they can do no harm, and judged by checks that they cannot talk to.

Each verdict starts a fresh interpreter (``python -I -S``, no environment, an empty folder of its own) that runs
``jail``. Where the system allows it (``unshare``), that interpreter has no network and sees no other process; on top of
that, and everywhere, there are limits on processor time, memory, file size, open files and processes, a refusal of
sockets, of new processes and of files elsewhere, and a wall-clock limit at whose end the whole group is killed.
Needs a POSIX system. It is meant for the mistakes and tricks of a small model, not for an attacker with a kernel bug.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Limits:
    wall_seconds: float = 10.0
    cpu_seconds: int = 4
    memory_bytes: int = 512 << 20
    """Address space, of the checker and of the candidate each."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A function's program and what is asked of it."""

    program: str
    entry_point: str
    """Name of the function."""
    checks: str
    """Trusted source that defines ``check(candidate)``, which raises when something is wrong."""
    prelude: str = ""
    """Trusted source that the checks build on."""


def passes(checked: Checked, limits: Limits | None = None) -> bool:
    """Whether all checks passed, in time. Arguments and results of the function must be literals (numbers, texts, None,
    lists, tuples, sets and dictionaries of them); anything else counts as wrong."""
    limits = limits or Limits()
    secret = secrets.token_hex(32)
    task = {"program": checked.program, "entry_point": checked.entry_point, "checks": checked.checks}
    line = json.dumps({**task, "prelude": checked.prelude, "secret": secret}) + "\n"
    jail = Path(__file__).with_name("jail.py")
    arguments = [str(limits.cpu_seconds), str(limits.memory_bytes)]
    with tempfile.TemporaryDirectory(prefix="kvcmas-") as folder:
        os.chmod(folder, 0o777)  # the candidate may be another user by then
        process = subprocess.Popen(
            [*_namespaces(), sys.executable, "-I", "-S", "-B", str(jail), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(line.encode(), limits.wall_seconds)
        except subprocess.TimeoutExpired:
            output = b""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return output == secret.encode()


@cache
def _namespaces() -> tuple[str, ...]:
    """The command that takes network and other processes away, or nothing where that is not permitted."""
    tool = shutil.which("unshare")
    if tool is None:
        return ()
    user = () if os.geteuid() == 0 else ("--user",)
    command = (tool, *user, "--net", "--pid", "--fork", "--kill-child", "--")
    try:
        tried = subprocess.run(
            [*command, sys.executable, "-I", "-S", "-c", ""], capture_output=True, timeout=10, env={}
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return command if tried.returncode == 0 else ()
