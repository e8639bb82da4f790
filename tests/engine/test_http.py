"""Over HTTP, with the stock `openai` client and no extra fields: four agents share, proved by counted tokens."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import CONNECTOR
from openai import OpenAI
from workflow import TURNS, Roles, contexts

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's own OpenAI server with its defaults (own process, asynchronous scheduling), and our connector."""
    folder = tmp_path_factory.mktemp("server")
    config = folder / "lmcache.yaml"
    # Two anchors disagree more than ten: the threshold is not what is tested here.
    config.write_text("chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 1.0\nextra_config:\n  kvcmas.theta: 0.2\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"LMCACHE_CONFIG_FILE": str(config), "VLLM_CPU_KVCACHE_SPACE": "2"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "smollm2", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(CONNECTOR)]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", server, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait_for(address: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(240):
        if server.poll() is not None:
            pytest.fail(f"the server ended: {log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the server did not come up: {log.read_text()[-3000:]}")


def _turn(client: OpenAI, agent: str, text: str, said: list[tuple[str, str]]) -> Any:
    roles = Roles.read()
    context = text + "".join(f"\n\n{heading}\n{output}" for heading, output in said)
    return client.chat.completions.create(
        model="smollm2",
        messages=[
            {"role": "system", "content": roles.roles[agent]},
            {"role": "user", "content": context + roles.instructions[agent]},
        ],
        max_tokens=24,
        temperature=0,
    )


def _wait_for_lessons(url: str, client: OpenAI, lessons: int) -> None:
    """Learning is off the critical path, and behind on a small machine. Its counts come with the steps of requests."""
    for _ in range(120):
        client.completions.create(model="smollm2", prompt="Hello", max_tokens=1)
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as metrics:
            for line in metrics.read().decode().splitlines():
                if 'kind="worker.learner.learned"' in line and float(line.split()[-1]) >= lessons:
                    return
        time.sleep(0.5)
    pytest.fail(f"{lessons} lessons were not learned")


def test_four_agents_share_without_any_change_to_the_client(url: str) -> None:
    """Agents and runs are found by content; after three contexts the edges are known, and the fourth is shared."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
    shared = reused = cached = 0
    for number, (_, text) in enumerate(list(contexts("anchor"))[3:7]):
        if number == 3:
            _wait_for_lessons(url, client, 9)
        said: list[tuple[str, str]] = []
        for turn in TURNS:
            answer = _turn(client, turn.agent, text, said)
            said.append((turn.heading, answer.choices[0].message.content))
            report = answer.model_extra["kv_transfer_params"]["kvcmas"]
            if number == 3 and turn.agent != "planner":
                shared += report["shared_tokens"]
                reused += report["reused_tokens"]
                cached += answer.usage.prompt_tokens_details.cached_tokens
    assert reused >= 0.5 * shared > 300
    assert cached >= reused, "vLLM counts what the connector gave"


def test_malformed_hints_cost_nothing(url: str) -> None:
    """A client that sends nonsense gets its answer all the same."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
    asked: dict[str, Any] = {
        "model": "smollm2",
        "prompt": "The capital of France is",
        "max_tokens": 4,
        "temperature": 0,
    }
    plain = client.completions.create(**asked)
    for nonsense in (
        {"kvcmas": 7},
        {"kvcmas": {"agent": 7, "share": "no", "what": []}},
        {"kvcmas": {"source": "nobody"}},
    ):
        odd = client.completions.create(**asked, extra_body={"kv_transfer_params": nonsense})
        assert odd.choices[0].text == plain.choices[0].text
