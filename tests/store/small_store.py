"""A real LMCache store, small enough that eviction is a matter of a few entries, and entries for it."""

from collections.abc import Callable

import torch

from lmcache_kvcmas.connectors.lmcache_open import StoreShape
from lmcache_kvcmas.connectors.lmcache_store import LMCacheStore
from lmcache_kvcmas.entries import EntryKind, Owner, TensorSpec

MIB = 1 << 20
OWNER = Owner("model-a", 0, 1)
SHAPE = StoreShape(layers=2, kv_heads=1, head_dim=8, dtype=torch.bfloat16)

OpenStore = Callable[..., LMCacheStore]


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def put(
    store: LMCacheStore, n: int, size: int = MIB, kind: EntryKind = EntryKind.BASE, value: int | None = None
) -> bool:
    """Stores ``size`` bytes, all of them ``value`` (else ``n % 251``). False if there was no room."""
    reservation = store.reserve(key(n), kind, {"x": TensorSpec((size,), torch.uint8)}, {"n": n})
    if reservation is None:
        return False
    reservation.tensors["x"].fill_(n % 251 if value is None else value)
    return reservation.commit()


def holds(store: LMCacheStore, n: int, kind: EntryKind = EntryKind.BASE, value: int | None = None) -> bool:
    """Whether entry ``n`` is found; what is found must be right."""
    lease = store.get(key(n), kind)
    if lease is None:
        return False
    with lease:
        assert lease.meta["n"] == n
        assert torch.all(lease.tensors["x"] == (n % 251 if value is None else value))
    return True
