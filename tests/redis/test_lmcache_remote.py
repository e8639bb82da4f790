"""LMCache's own traffic through our plugin, loaded by LMCache itself: what is read back, and what every fault costs."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from redis_server import RedisServer, wait_until

from lmcache_kvcmas.connectors import lmcache_api as lm
from lmcache_kvcmas.connectors.lmcache_remote import HEAD, KVCMASRemoteConnector
from lmcache_kvcmas.connectors.redis_settings import PREFIX

LAYERS, CHUNK, HEADS, DIM = 2, 16, 2, 8
SHAPE = torch.Size([2, LAYERS, CHUNK, HEADS * DIM])
DTYPE = torch.bfloat16
NAME = "RemoteBackend-kvcmas"

OpenManager = Callable[..., Any]


@pytest.fixture
def open_manager(tmp_path: Path) -> Iterator[OpenManager]:
    """LMCache's storage manager with its CPU tier and our plugin."""
    opened: list[Any] = []

    def open_one(server: RedisServer, **settings: Any) -> Any:
        extra = {
            f"{PREFIX}module_path": "lmcache_kvcmas.connectors.lmcache_remote",
            f"{PREFIX}class_name": "KVCMASRemoteConnector",
            f"{PREFIX}url": server.url,
            f"{PREFIX}timeout_ms": 1000,
            **{PREFIX + name: value for name, value in settings.items()},
        }
        file = tmp_path / f"lmcache{len(opened)}.yaml"
        lines = "".join(f"  {name}: {value}\n" for name, value in extra.items())
        file.write_text(
            f"chunk_size: {CHUNK}\nmax_local_cpu_size: 0.01\nremote_storage_plugins: ['kvcmas']\nextra_config:\n{lines}"
        )
        metadata = lm.LMCacheMetadata(
            model_name="model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=DTYPE,
            kv_shape=(LAYERS, 2, CHUNK, HEADS, DIM),
            role="worker",
            chunk_size=CHUNK,
        )
        config = lm.LMCacheEngineConfig.from_file(str(file))
        opened.append(lm.StorageManager(config, metadata, lm.EventManager()))
        return opened[-1]

    yield open_one
    for manager in opened:
        manager.close()


def key(n: int) -> Any:
    return lm.CacheEngineKey("model", 1, 0, n, DTYPE)


def put(
    manager: Any, numbers: range, shape: torch.Size = SHAPE, dtype: torch.dtype = DTYPE, fmt: str = "KV_2LTD"
) -> None:
    objs = []
    for n in numbers:
        obj = manager.allocate(shape, dtype, lm.MemoryFormat[fmt], eviction=True, busy_loop=False)
        assert obj is not None
        obj.tensor.fill_(n % 100)
        objs.append(obj)
    manager.batched_put([key(n) for n in numbers], objs, location=NAME)


def get(manager: Any, numbers: range) -> list[Any]:
    """What each entry is filled with (with its shape and dtype checked by the caller), or None."""
    objs = manager.storage_backends[NAME].batched_get_blocking([key(n) for n in numbers])
    values = []
    for obj in objs:
        values.append(None if obj is None else obj.tensor.clone())
        if obj is not None:
            obj.ref_count_down()
    return values


def stored(server: RedisServer) -> list[bytes]:
    return [line for line in server.cli("KEYS", "*").split(b"\r\n") if b"lmcache" in line]


def test_lmcache_reads_what_another_lmcache_stored(server: RedisServer, open_manager: OpenManager) -> None:
    writer, reader = open_manager(server), open_manager(server)
    connector = reader.storage_backends[NAME].connection.getWrappedConnector()
    assert isinstance(connector, KVCMASRemoteConnector), "LMCache did not load the plugin"
    put(writer, range(10))
    wait_until(lambda: len(stored(server)) == 10, 5)
    values = get(reader, range(11))
    assert all(torch.equal(values[n], torch.full(SHAPE, n, dtype=DTYPE)) for n in range(10))
    assert values[10] is None
    remote = reader.storage_backends[NAME]
    assert [remote.contains(key(n)) for n in (0, 9, 10)] == [True, True, False]
    assert remote.batched_contains([key(n) for n in (3, 4, 10, 5)]) == 2
    assert [obj is not None for obj in reader.batched_get([key(n) for n in range(4)], location=NAME)] == [True] * 4
    assert reader.storage_backends["LocalCPUBackend"].contains(key(3)), "LMCache no longer keeps what it fetched"
    ttl = int(server.cli("TTL", stored(server)[0]).strip(b":\r\n"))
    assert 600_000 < ttl <= 604_800
    assert all(name.startswith(b"kvcmas:lmcache:model@") for name in stored(server)), "one key an entry, with a prefix"
    assert remote.remove(key(0)) is True
    assert remote.contains(key(0)) is False


@pytest.mark.parametrize(
    ("shape", "dtype", "fmt"),
    [
        ((2, LAYERS, 5, HEADS * DIM), torch.bfloat16, "KV_2LTD"),
        ((1000,), torch.uint8, "HS_TD"),
        ((7, 2, 16), torch.float32, "KV_T2D"),
    ],
)
def test_other_shapes_come_back_as_they_were(
    server: RedisServer, open_manager: OpenManager, shape: tuple[int, ...], dtype: torch.dtype, fmt: str
) -> None:
    manager = open_manager(server)
    put(manager, range(1), torch.Size(shape), dtype, fmt)
    wait_until(lambda: len(stored(server)) == 1, 5)
    [obj] = manager.storage_backends[NAME].batched_get_blocking([key(0)])
    assert (tuple(obj.get_shape()), obj.get_dtype(), obj.get_memory_format().name) == (shape, dtype, fmt)
    obj.ref_count_down()


def test_damage_is_a_miss_and_goes(server: RedisServer, open_manager: OpenManager) -> None:
    manager = open_manager(server)
    put(manager, range(6))
    wait_until(lambda: len(stored(server)) == 6, 5)
    remote = manager.storage_backends[NAME]
    names = {n: f"kvcmas:lmcache:{key(n).to_string()}" for n in range(6)}
    whole = HEAD + SHAPE.numel() * DTYPE.itemsize
    assert server.cli("STRLEN", names[0]) == b":%d\r\n" % whole
    server.cli("SETRANGE", names[0], whole - 1, b"\x01")  # a flipped bit in the payload
    server.cli("SETRANGE", names[1], 20, b"\xff")  # in the head
    server.cli("SET", names[2], b"cut short")
    server.cli("APPEND", names[3], b"more")
    server.cli("RENAME", names[5], names[4])  # another key's entry
    assert [remote.contains(key(n)) for n in (1, 2, 3)] == [False] * 3, "LMCache is told of entries that are not whole"
    assert get(manager, range(5)) == [None] * 5
    assert stored(server) == [], "what is damaged was not removed"
    connector = remote.connection.getWrappedConnector()
    assert connector._client.stats["damaged"] == 5


def test_a_server_that_hangs_costs_one_time_out_and_close_none(server: RedisServer, open_manager: OpenManager) -> None:
    manager = open_manager(server, timeout_ms=300)
    put(manager, range(4))
    wait_until(lambda: len(stored(server)) == 4, 5)
    server.stop()
    begun = time.monotonic()
    assert get(manager, range(4)) == [None] * 4
    assert 0.25 < time.monotonic() - begun < 0.8
    begun = time.monotonic()
    assert manager.storage_backends[NAME].contains(key(0)) is False
    assert manager.storage_backends[NAME].batched_contains([key(0)]) == 0
    put(manager, range(4, 8))
    assert time.monotonic() - begun < 0.2
    server.go_on()
    wait_until(lambda: get(manager, range(4))[0] is not None, 10)
    server.stop()
    begun = time.monotonic()
    manager.storage_backends[NAME].close()
    assert time.monotonic() - begun < 1
    server.go_on()


def test_a_server_that_is_not_there_is_used_once_it_is(server: RedisServer, open_manager: OpenManager) -> None:
    server.kill()
    manager = open_manager(server)
    assert get(manager, range(2)) == [None, None]
    server.start()

    def comes_back() -> bool:
        put(manager, range(2))
        return bool(get(manager, range(2))[1] is not None)

    wait_until(comes_back, 10)


def test_memory_is_given_back(server: RedisServer, open_manager: OpenManager) -> None:
    """Twenty of these, half of them damaged, through memory that holds five."""
    manager = open_manager(server)
    shape = torch.Size([2, LAYERS, 16384, HEADS * DIM])
    for n in range(20):
        put(manager, range(n, n + 1), shape)
        name = f"kvcmas:lmcache:{key(n).to_string()}"
        wait_until(lambda name=name: server.cli("EXISTS", name) == b":1\r\n", 5)  # type: ignore[misc]
        if n % 2:
            server.cli("SETRANGE", name, HEAD + 9, b"\x77")
        assert (get(manager, range(n, n + 1))[0] is None) == bool(n % 2)
