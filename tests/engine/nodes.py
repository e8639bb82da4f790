"""Nodes in processes of their own, from the test's side."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_START_SECONDS, _ANSWER_SECONDS = 240, 240


class Node:
    """One engine in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", answers: int, log: Path) -> None:
        self.process, self._answers, self._log = process, answers, log
        self._read = b""

    def ask(self, agent: str, text: str, **more: Any) -> dict[str, Any]:
        """Ask as an agent about a context. See ``node.py`` for what else can be said."""
        return self._send({"do": "ask", "agent": agent, "text": text} | more)

    def settle(self) -> dict[str, Any]:
        """Wait until everything so far is learned, and written to Redis or dropped."""
        return self._send({"do": "settle"})

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def _send(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        return self.receive(_ANSWER_SECONDS)

    def receive(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self._answers, 1 << 20) if ready else b""
            if not more:
                raise AssertionError(f"the node ended or hung: {self._log.read_text()[-4000:]}")
            self._read += more
        line, self._read = self._read.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def node(
    model: Path,
    folder: Path,
    name: str,
    redis: dict[str, Any],
    settings: dict[str, Any] | None = None,
    lmcache: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Node]:
    """Start a node whose shared tier is ``redis`` (its settings), and end it.

    Every node has a hash seed of its own, as processes on different machines have.
    """
    plugin = {f"remote_storage_plugin.kvcmas.{key}": value for key, value in redis.items()}
    receive, answers = os.pipe()
    setup = {
        "model": str(model),
        "settings": settings or {},
        "lmcache": {"remote_storage_plugins": ["kvcmas"], "max_local_cpu_size": 0.5, **(lmcache or {})},
        "extra": plugin,
        "options": options,
        "answers": answers,
    }
    environment = os.environ | {
        "PYTHONPATH": str(_HERE.parents[1] / "examples"),
        "PYTHONHASHSEED": str(sum(name.encode())),
    }
    log = folder / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(_HERE / "node.py"), json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[answers],
            env=environment,
            cwd=folder,
        )
    os.close(answers)
    running = Node(process, receive, log)
    try:
        running.receive(_START_SECONDS)
        yield running
    finally:
        os.close(receive)
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
