"""Two vLLM servers and one Redis: what one node computed and learned serves the other one's first request.

Node 1 serves a planner and a solver on three contexts, and learns how the solver's cache differs from the planner's.
It serves the planner on a fourth context. Then node 2 starts, which never saw any of this, and serves the solver on the
fourth. Clients talk to both in OpenAI's protocol. Exits with 0 only if node 2 reused tokens on its first request.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from redis import Redis
from rich.console import Console
from rich.table import Table
from workflow import Roles, contexts

CONNECTOR = {
    "kv_connector": "KVCMASConnector",
    "kv_connector_module_path": "lmcache_kvcmas.connectors.vllm",
    "kv_role": "kv_both",
}
LEARNED = 3  # contexts
SAID = 24  # tokens of each answer
# A lesson has to be prefilled densely; without this hint, the third context would be shared already.
LESSON = {"kv_transfer_params": {"kvcmas": {"share": False}}}
# The same prompt for comparison: of another tenant, so that it finds nothing, and leaves nothing.
DENSE = {"kv_transfer_params": {"kvcmas": {"share": False, "capture": False}}, "cache_salt": "dense"}
progress = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Answer:
    text: str
    report: dict[str, Any]
    """The connector's: tokens by where their cache came from."""
    ttft: float


class Node:
    """A vLLM server, over HTTP."""

    def __init__(self, url: str) -> None:
        self._url, self._roles = url, Roles.read()

    def ask(self, agent: str, context: str, extra: dict[str, Any] | None = None) -> Answer:
        """One agent's turn: its role, then the context and its instruction."""
        before = self._metric("vllm:time_to_first_token_seconds_sum")
        messages = [
            {"role": "system", "content": self._roles.roles[agent]},
            {"role": "user", "content": context + self._roles.instructions[agent]},
        ]
        asked = {"model": "model", "messages": messages, "max_tokens": SAID, "temperature": 0}
        got = json.loads(self._http("/v1/chat/completions", asked | (extra or {})))
        ttft = self._metric("vllm:time_to_first_token_seconds_sum") - before
        return Answer(got["choices"][0]["message"]["content"], got["kv_transfer_params"]["kvcmas"], ttft)

    def up(self) -> bool:
        with contextlib.suppress(OSError):
            self._http("/health")
            return True
        return False

    def _metric(self, part: str) -> float:
        lines = self._http("/metrics").decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if part in line and "_created" not in line)

    def _http(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: bytes = answer.read()
        return found


@contextlib.contextmanager
def process(command: list[str], log: Path, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command in its log's folder, and end it."""
    with log.open("w") as file:
        running = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent, env=os.environ | environment
        )
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()


def wait_for(server: Redis, prefix: str, records: int, anchors: int) -> None:
    """Until Redis has what node 1 left: learning and writing are off the critical path."""
    for _ in range(240):
        names = list(server.scan_iter(f"{prefix}:*"))
        pools = [name for name in names if b":pool:" in name]
        if sum(b":record:" in name for name in names) >= records and sum(map(server.zcard, pools)) >= anchors:
            return
        time.sleep(0.5)
    raise SystemExit(f"Redis does not hold {records} records and {anchors} anchors")


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """An empty Redis on a free port."""
    beside = str(Path(sys.executable).parent)
    binary = shutil.which("redis-server") or shutil.which("redis-server", path=beside)
    if binary is None:
        raise SystemExit("no redis-server on the PATH: install it, or give --redis URL")
    port = free_port()
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    options += ["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
    with process([binary, *options], folder / "redis.log"):
        yield f"redis://127.0.0.1:{port}"


@contextlib.contextmanager
def node(name: str, model: Path, lmcache: dict[str, Any], folder: Path) -> Iterator[Node]:
    """A vLLM server with the connector, once it answers."""
    home = folder / name.replace(" ", "")
    home.mkdir()
    file, log, port = home / "lmcache.yaml", home / "log", free_port()
    file.write_text(yaml.safe_dump(lmcache))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.resolve())]
    command += ["--served-model-name", "model", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--kv-transfer-config", json.dumps(CONNECTOR)]
    environment = {"LMCACHE_CONFIG_FILE": str(file), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    progress.print(f"{name} starts (about a minute on two cores) …")
    with process(command, log, **environment) as server:
        running = Node(f"http://127.0.0.1:{port}")
        until = time.monotonic() + 300
        while not running.up():
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{name} did not start. The end of its log:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield running


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--redis", metavar="URL", help="a Redis that runs; else one is started")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end as well

    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        url = arguments.redis or running.enter_context(redis_server(folder))
        server = Redis.from_url(url)
        prefix = f"kvcmas-two-nodes-{os.getpid()}"
        plugin = {
            "url": url,
            "prefix": prefix,  # finds nothing of an earlier run
            "ttl_seconds": 600,
            "timeout_ms": 2000,  # servers and Redis share a few cores here; the default is 250
        }
        extra: dict[str, Any] = {f"remote_storage_plugin.kvcmas.{name}": value for name, value in plugin.items()}
        extra["kvcmas.theta"] = 0.2  # three examples disagree more than ten, for which the default was chosen
        lmcache = {"max_local_cpu_size": 0.5, "remote_storage_plugins": ["kvcmas"], "extra_config": extra}
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in ("request", "node", "shared", "reused", "dense", "TTFT", "decision"):
            table.add_column(name, justify="left" if name in ("request", "decision") else "right", no_wrap=True)

        def row(request: str, number: int, answer: Answer) -> None:
            told = answer.report
            tokens = [str(told[f"{origin}_tokens"]) for origin in ("shared", "reused", "dense")]
            style = "green" if told["reused_tokens"] else None
            table.add_row(request, str(number), *tokens, f"{answer.ttft:.2f} s", told["decision"], style=style)

        first = running.enter_context(node("node 1", arguments.model, lmcache, folder))
        texts = [text for _, text in contexts("anchor")][3 : 3 + LEARNED]
        for number, text in enumerate(texts, 1):
            plan = first.ask("planner", text, LESSON)
            row(f"planner, context {number}", 1, plan)
            row(f"solver, context {number}", 1, first.ask("solver", f"{text}\n\nPlan:\n{plan.text}", LESSON))
        progress.print("node 1 learns planner → solver …")
        wait_for(server, prefix, 2 * LEARNED, LEARNED)
        new = next(text for name, text in contexts("dev") if name == "d05")
        plan = first.ask("planner", new)
        row("planner, new context", 1, plan)
        wait_for(server, prefix, 2 * LEARNED + 1, LEARNED)

        second = running.enter_context(node("node 2", arguments.model, lmcache, folder))
        new += f"\n\nPlan:\n{plan.text}"
        shared = second.ask("solver", new)
        row("solver, new context", 2, shared)
        row("the same, not shared", 2, second.ask("solver", new, DENSE))
    Console().print(table)
    sys.exit(0 if shared.report["reused_tokens"] else 1)


if __name__ == "__main__":
    main()
