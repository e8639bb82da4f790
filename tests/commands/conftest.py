"""A real Redis that real stores have filled, among keys of others."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from filled import Filled
from redis_server import RedisServer, Servers, servers


@pytest.fixture(scope="session")
def command_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(scope="session")
def command_server(command_servers: Servers) -> RedisServer:
    """Emptied before each test that fills it."""
    return command_servers.one()


@pytest.fixture
def filled(command_server: RedisServer, tmp_path: Path) -> Iterator[Filled]:
    """Two tenants of one model, two edges; beside them keys of others, one of which has nearly our prefix."""
    command_server.cli("FLUSHALL")
    with ExitStack() as opened:
        yield Filled(command_server, tmp_path, opened)
