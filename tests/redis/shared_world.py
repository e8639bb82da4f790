"""Nodes on one Redis, and small things to put there: real stores, tiers, journals and books."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from redis import Redis
from redis_server import RedisServer

from lmcache_kvcmas.anchors import Anchor, Caches
from lmcache_kvcmas.connectors.journal import Journal
from lmcache_kvcmas.connectors.lmcache_config import load_lmcache_config
from lmcache_kvcmas.connectors.lmcache_open import StoreShape, open_store
from lmcache_kvcmas.connectors.lmcache_store import LMCacheStore
from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_names import Names
from lmcache_kvcmas.connectors.redis_settings import RedisSettings
from lmcache_kvcmas.edges import EdgeBook
from lmcache_kvcmas.entries import EntryKind, Owner, TensorSpec
from lmcache_kvcmas.keys import KeySpace
from lmcache_kvcmas.manifest import Needed
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.shared import News
from lmcache_kvcmas.spans import Edge, Piece

MODEL, TENANT = "a model", "t"
KEYS = KeySpace(MODEL, TENANT)
EDGE = Edge("solver", "critic", 0)
SIZE = 3 << 20


class World:
    """Nodes on one server: ``server``'s, or wherever ``url`` points. Settings given with a node go before it."""

    def __init__(self, folder: Path, server: RedisServer | str) -> None:
        self.folder, self.server = folder, server
        self.url = server if isinstance(server, str) else server.url
        self._open = ExitStack()

    def store(self, name: str, rank: int = 0, size: int = 1, cpu: float = 0.05, **redis: object) -> LMCacheStore:
        file = self.folder / f"{name}{rank}.yaml"
        plugin = {"url": self.url, "timeout_ms": 2000} | redis
        extra = "".join(f"  remote_storage_plugin.kvcmas.{k}: {v}\n" for k, v in plugin.items())
        text = f"chunk_size: 16\nmax_local_cpu_size: {cpu}\nremote_storage_plugins: [kvcmas]\nextra_config:\n{extra}"
        file.write_text(text)
        shape = StoreShape(layers=3, kv_heads=2, head_dim=8, dtype=torch.float32)
        store = open_store(load_lmcache_config(str(file)), Owner(MODEL, rank, size), shape, name)
        self._open.callback(store.close)
        return store

    def journal(
        self, name: str, size: int = 1, told: Callable[[News], None] | None = None, keep: int = 100, **redis: object
    ) -> Journal:
        settings = {"url": self.url, "timeout_ms": 2000} | redis
        client = RedisClient(RedisSettings(**settings))  # type: ignore[arg-type]
        journal = Journal(client, Names("kvcmas", Owner(MODEL, 0, size)), name, keep, told=told)
        self._open.callback(journal.close)
        return journal

    def book(self, store: LMCacheStore, capacity: int = 4) -> EdgeBook:
        return EdgeBook(store, lambda t: KeySpace(MODEL, t), "attention", capacity, torch.device("cpu"))

    def close(self) -> None:
        self._open.close()


class Counted:
    """Counts what goes into a store's tier, and that its memory is let go of once. Thread-safe."""

    def __init__(self, store: LMCacheStore) -> None:
        self.store, self.queued, self.released, self.hits = store, 0, 0, 0
        tier, lock = store.shared, threading.Lock()
        assert tier is not None
        put, get = tier.put, store.get

        def counted_put(needed: Needed, blob: memoryview, release: Callable[[], None]) -> None:
            def released() -> None:
                with lock:
                    self.released += 1
                release()

            with lock:
                self.queued += 1
            put(needed, blob, released)

        def counted_get(key: bytes, kind: EntryKind) -> object:
            lease = get(key, kind)
            with lock:
                self.hits += lease is not None
            return lease

        tier.put = counted_put  # type: ignore[method-assign]
        store.get = counted_get  # type: ignore[method-assign,assignment]

    def check(self) -> None:
        """Every put ended in one way, and once nothing waits, nothing is held."""
        counts = self.store.shared.counts  # type: ignore[union-attr]
        ends = {name: counts.get(name, 0) for name in ("written", "there", "dropped", "dropped_full")}
        assert sum(ends.values()) == self.queued, f"{ends}, of {self.queued} that were put"
        assert self.released == self.queued, f"{self.released} let go of, of {self.queued}"
        assert self.store.stats().leased == 0


def plain(world: World) -> Redis:
    return Redis.from_url(world.url)


def put(store: LMCacheStore, key: bytes, kind: EntryKind = EntryKind.BASE, value: int = 5, size: int = SIZE) -> None:
    room = store.reserve(key, kind, {"x": TensorSpec((size,), torch.uint8)}, {})
    assert room is not None
    room.tensors["x"].fill_(value)
    assert room.commit()


def holds(store: LMCacheStore, key: bytes, kind: EntryKind = EntryKind.BASE, value: int = 5) -> bool:
    lease = store.get(key, kind)
    if lease is None:
        return False
    with lease:
        return bool((lease.tensors["x"] == value).all())


def base(n: int) -> bytes:
    return KEYS.base(bytes([n]))


def record(*chunks: bytes, n: int = 0) -> Record:
    pieces = tuple(Piece(16 * i, 16 * i + 16, chunk, 0) for i, chunk in enumerate(chunks))
    return Record(KEYS.record(bytes([n])), np.arange(16 * len(chunks), dtype=np.int32), 8, pieces, salt=TENANT)


def anchor(seed: int) -> Anchor:
    g = torch.Generator().manual_seed(seed)
    k, v, dk, dv = torch.randn(4, 3, 40, 16, generator=g)
    return Anchor.learn(Caches(k, v), Caches(dk, dv), rank=4)


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> float:
    """Seconds that it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"it did not come about in {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - begun
