"""Real redis-servers, and clients of them that are closed at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer, Servers, servers

from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_settings import RedisSettings

OpenClient = Callable[..., RedisClient]


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One that no test harms."""
    with servers(tmp_path_factory.mktemp("redis")) as started:
        yield started.one()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Servers]:
    """Starts servers that the test may harm."""
    with servers(tmp_path) as started:
        yield started


@pytest.fixture
def open_client() -> Iterator[OpenClient]:
    """Opens clients of a server, or of a url; patient ones, if the test says nothing else: the machine may be busy."""
    opened: list[RedisClient] = []

    def open_one(server: RedisServer | str, **settings: Any) -> RedisClient:
        url = server if isinstance(server, str) else server.url
        opened.append(RedisClient(RedisSettings(url, **{"timeout_ms": 3000} | settings)))
        return opened[-1]

    yield open_one
    for client in opened:
        client.close()


@pytest.fixture
def server(start: Servers) -> RedisServer:
    """One that the test may harm."""
    return start.one()
