"""Fills Redis as servers do: through the store, the tier and the edges' book."""

import dataclasses
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import torch
from redis_server import RedisServer

from lmcache_kvcmas import entries
from lmcache_kvcmas.anchors import Anchor, Caches
from lmcache_kvcmas.connectors.lmcache_config import load_lmcache_config
from lmcache_kvcmas.connectors.lmcache_open import StoreShape, open_store
from lmcache_kvcmas.connectors.lmcache_store import LMCacheStore
from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_names import Names, model_mark
from lmcache_kvcmas.connectors.redis_settings import RedisSettings
from lmcache_kvcmas.edges import EdgeBook
from lmcache_kvcmas.entries import EntryKind, Meta, Owner, TensorSpec, read_header
from lmcache_kvcmas.factors import Factors
from lmcache_kvcmas.keys import KeySpace
from lmcache_kvcmas.learner import named
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.spans import Edge, Piece
from lmcache_kvcmas.tenants import tenant_name

MODEL = "a model"
MARK = model_mark(MODEL)
TENANTS = (tenant_name("", None), tenant_name("", "acme"))
EDGES = (Edge("planner", "solver", 0), Edge("solver", "critic", 0))
SHAPE = StoreShape(layers=2, kv_heads=1, head_dim=16, dtype=torch.float32)
_CHUNK = 16
FOREIGN = ("someone:else", "kvcmas2:not:ours", f"kvcmas:other:{'0' * 16}:base:0-1:{'0' * 12}:{{{'0' * 8}}}{'0' * 44}")


class Filled:
    """What was put where. Each tenant has ``records`` of a base and a delta, and ``anchors`` on each edge."""

    records, anchors = 3, 2

    def __init__(self, server: RedisServer, folder: Path, opened: ExitStack, mode: str = "standalone") -> None:
        self.server, self.prefix = server, "kvcmas"
        self.config = folder / "lmcache.yaml"
        self.config.write_text(
            "chunk_size: 16\nmax_local_cpu_size: 0.02\nremote_storage_plugins: [kvcmas]\nextra_config:\n"
            f"  remote_storage_plugin.kvcmas.url: {server.url}\n"
            "  remote_storage_plugin.kvcmas.timeout_ms: 5000\n"
            f"  remote_storage_plugin.kvcmas.prefix: {self.prefix}\n"
            f"  remote_storage_plugin.kvcmas.mode: {mode}\n"
            "  kvcmas.max_anchors: 4\n"
        )
        self.client = RedisClient(RedisSettings(server.url, timeout_ms=5000, mode=mode))
        opened.callback(self.client.close)
        store = open_store(load_lmcache_config(str(self.config)), Owner(MODEL), SHAPE, "a node")
        opened.callback(store.close)
        book = EdgeBook(store, lambda t: KeySpace(MODEL, t), "none", 4, torch.device("cpu"))
        self.names = Names(self.prefix, Owner(MODEL))
        for seed, tenant in enumerate(TENANTS):
            for n in range(self.records):
                store.publish(self._record(store, tenant, n))
            for edge in EDGES:
                for n in range(self.anchors):
                    book.learn(tenant, edge, _anchor(10 * seed + n))
        assert store.flush(20)
        for name in FOREIGN if mode == "standalone" else ():
            server.cli("SET", name, "theirs")

    def keys(self, kind: str = "*", tenant: str | None = None) -> list[str]:
        """Names of ours, straight from the server."""
        mark = "*" if tenant is None else KeySpace(MODEL, tenant).tenant.hex()
        return sorted(n.decode() for n in self.client.scan(f"{self.prefix}:{MARK}:{kind}:0-1:{mark}:*"))

    def everything(self) -> set[str]:
        return {name.decode() for name in self.client.scan("*")}

    def _record(self, store: LMCacheStore, tenant: str, n: int) -> Record:
        keys = KeySpace(MODEL, tenant)
        base, delta = keys.base(bytes([n])), keys.delta(bytes([n]))
        k = torch.randn(2, _CHUNK, 16, generator=torch.Generator().manual_seed(n))
        _put(store, base, EntryKind.BASE, {"k": k, "v": k}, {"position": 0})
        factors = Factors.of(k, 2)
        _put(store, delta, EntryKind.DELTA, named(factors, factors), {})
        pieces = (Piece(0, _CHUNK, base, 0), Piece(_CHUNK, 2 * _CHUNK, base, 0, delta, 0, exact=False))
        tokens = np.arange(2 * _CHUNK, dtype=np.int32) + n
        return Record(keys.record(bytes([n])), tokens, 8, pieces, agent="solver", salt=tenant)


def _put(store: LMCacheStore, key: bytes, kind: EntryKind, tensors: dict[str, torch.Tensor], meta: Meta) -> None:
    room = store.reserve(key, kind, {name: TensorSpec.of(t) for name, t in tensors.items()}, meta)
    assert room is not None
    for name, tensor in tensors.items():
        room.tensors[name].copy_(tensor)
    assert room.commit()


def _anchor(seed: int) -> Anchor:
    generator = torch.Generator().manual_seed(seed)
    k, v, dk, dv = torch.randn(4, 2, 40, 16, generator=generator)
    return Anchor.learn(Caches(k, v), Caches(dk, dv), rank=4)


def aged(client: RedisClient, name: str, seconds: float) -> None:
    """Makes an entry look as if it had been written that long ago."""
    [blob] = client.get_many([name])
    assert blob is not None
    header = read_header(bytes(blob))
    data = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    entry = entries.decode(data, kind=header.kind, owner=header.owner, key=header.key)
    specs = {n: TensorSpec.of(t) for n, t in entry.tensors.items()}
    layout = entries.lay_out(header.kind, header.key, header.owner, specs, header.meta)
    earlier = msgspec.structs.replace(header, created=time.time() - seconds)
    old = dataclasses.replace(layout, header=entries._ENCODER.encode(earlier))
    buffer = torch.empty(old.size, dtype=torch.uint8)
    for n, view in old.views(buffer).items():
        view.copy_(entry.tensors[n])
    old.seal(buffer)
    client.put_many([(name, memoryview(buffer.numpy()))])
