"""A Redis that is not there when the engine starts costs nothing but what it would have given."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Answer, Engine, engine
from redis_server import RedisServer, servers
from workflow import Roles, contexts

pytestmark = pytest.mark.engine
FORCED = [260, 1735, 282]


def hop(llm: Engine, agent: str, text: str, **more: object) -> Answer:
    return llm.ask(Roles.read().prompt(llm.llm.get_tokenizer(), agent, text), 4, FORCED, **more)  # type: ignore[arg-type]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with servers(tmp_path) as started:
        yield started.one()


def test_an_engine_starts_without_redis_and_shares_when_it_comes(model: Path, server: RedisServer) -> None:
    texts = [text for _, text in contexts("anchor")]
    server.kill()
    plugin = {"url": server.url, "timeout_ms": 250}
    extra = {f"remote_storage_plugin.kvcmas.{name}": value for name, value in plugin.items()}
    lmcache = {"remote_storage_plugins": ["kvcmas"], "max_local_cpu_size": 0.5}
    with engine(model, {"theta": 0.2}, lmcache=lmcache, extra=extra, max_model_len=1024) as llm:
        shared = llm.connector.worker.store.shared
        for text in texts[4:6]:
            hop(llm, "planner", text)
            hop(llm, "solver", text)
        llm.settle()
        hop(llm, "planner", texts[3])
        local = hop(llm, "solver", texts[3], hints={"capture": False})
        assert local.report["reused_tokens"] > 200, "this node's own tiers need no Redis"
        assert shared.counts["published"] == 0
        # Requests go on at once: nothing of theirs waits for a server that is not there.
        dense = hop(llm, "critic", texts[7], hints={"share": False, "capture": False}, salt="nobody")
        began = time.monotonic()
        alone = hop(llm, "critic", texts[7], hints={"capture": False})
        assert time.monotonic() - began < dense.seconds + 1.0  # twice that by measurement, on a noisy machine
        assert (alone.logits - dense.logits).abs().max() <= 1e-3
        server.restart()
        deadline = time.monotonic() + 10
        while not shared.counts["published"]:
            assert time.monotonic() < deadline, "Redis has been there for ten seconds"
            hop(llm, "planner", texts[8], salt=str(time.monotonic()))
            llm.settle()
            llm.connector.worker.store.flush(2)
