"""What is known of each edge: its anchor pool, and the predictor built from it. Pools live in the store as entries."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from lmcache_kvcmas.anchors import Anchor, AnchorPool
from lmcache_kvcmas.entries import EntryKind, TensorSpec
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.keys import KEY_BYTES, KeySpace
from lmcache_kvcmas.predict import Predictor, build_predictor
from lmcache_kvcmas.spans import Edge
from lmcache_kvcmas.store import EntryStore

KeysOf = Callable[[str], KeySpace]
"""The keys of a tenant."""

_WORKING_SET = 64  # edges whose pools are kept unpacked; others are read from the store when they are used again


class Ready(NamedTuple):
    """A predictor, and what it was built from."""

    predictor: Predictor
    pool: AnchorPool
    anchors: int
    """That the predictor knows: the pool may hold newer ones. The gate must judge these."""


@dataclass(eq=False)
class _Known:
    pool: AnchorPool
    keys: dict[int, bytes]
    """Store key of each anchor of the pool, by the anchor's identity."""
    ready: Ready | None = None


class EdgeBook:
    """Pools and predictors by tenant and edge. Thread-safe: one thread learns while another predicts."""

    def __init__(
        self, store: EntryStore, keys_of: KeysOf, predictor: str, max_anchors: int, device: torch.device
    ) -> None:
        self._store, self._keys_of = store, keys_of
        self._name, self._max_anchors, self._device = predictor, max_anchors, device
        self._known: OrderedDict[tuple[str, Edge], _Known] = OrderedDict()
        self._changed: dict[tuple[str, Edge], int] = {}
        self._unprepared: set[tuple[str, Edge]] = set()
        self._lock = threading.RLock()

    def ready(self, tenant: str, edge: Edge) -> Ready:
        """The predictor of ``edge``. It may not know the pool's latest anchor yet: a request does not wait for that."""
        with self._lock:
            known = self._find(tenant, edge)
        return known.ready or self._build(known)

    def learn(self, tenant: str, edge: Edge, anchor: Anchor) -> None:
        """Offer an anchor to the edge's pool, and store both. Call `prepare` when there is time."""
        with self._lock:
            known = self._find(tenant, edge)
        keys = self._keys_of(tenant)
        tensors = {name: t.contiguous() for name, t in anchor.tensors().items()}
        content = blake3(repr(edge).encode())
        for name in sorted(tensors):
            content.update(tensors[name].cpu().flatten().view(torch.uint8).numpy().tobytes())
        key = keys.anchor(content.digest())
        stored = self._put(key, EntryKind.ANCHOR, tensors)
        evicted = known.pool.add(anchor)
        if stored:
            known.keys[id(anchor)] = key
        if evicted is not None and (old := known.keys.pop(id(evicted), None)) is not None:
            self._store.remove(old)
        # The list last: a reader never finds a name in it that has no anchor.
        names = [known.keys[id(a)] for a in known.pool.anchors if id(a) in known.keys]
        if names:
            listed = torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8).view(-1, KEY_BYTES)
            self._put(keys.pool(edge), EntryKind.POOL, {"anchors": listed})
        with self._lock:
            self._unprepared.add((tenant, edge))

    def prepare(self) -> None:
        """Build the predictors of edges that learned something, and make the edges known as changed."""
        while self._unprepared:
            with self._lock:
                name = self._unprepared.pop()
                known = self._find(*name)
            ready = self._build(known)
            with self._lock:
                self._changed[name] = ready.anchors

    def _build(self, known: _Known) -> Ready:
        # Not under the lock: it takes most of a second on a CPU, and requests on other edges go on meanwhile.
        state = known.pool.state
        known.ready = Ready(build_predictor(self._name, state, str(self._device)), known.pool, len(state.anchors))
        return known.ready

    def take_changed(self) -> dict[tuple[str, Edge], int]:
        """Anchors that each edge's predictor knows, for edges that learned something since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
            return changed

    def _find(self, tenant: str, edge: Edge) -> _Known:
        known = self._known.get((tenant, edge))
        if known is None:
            known = self._known[tenant, edge] = self._read(tenant, edge)
            while len(self._known) > _WORKING_SET:
                self._known.popitem(last=False)
        self._known.move_to_end((tenant, edge))
        return known

    def _read(self, tenant: str, edge: Edge) -> _Known:
        """The pool as the store has it; anchors that are gone or damaged are left out."""
        known = _Known(AnchorPool(self._max_anchors), {})
        lease = self._store.get(self._keys_of(tenant).pool(edge), EntryKind.POOL)
        if lease is None:
            return known
        with lease:
            listed = lease.tensors.get("anchors")
            rows = [] if listed is None or listed.shape[-1] != KEY_BYTES else listed.reshape(-1, KEY_BYTES).tolist()
        for key in [bytes(row) for row in rows[-self._max_anchors :]]:
            entry = self._store.get(key, EntryKind.ANCHOR)
            if entry is None:
                continue
            with entry:
                try:
                    anchor = Anchor.from_tensors({name: t.clone() for name, t in entry.tensors.items()})
                except EntryError:
                    continue
            known.pool.add(anchor)
            known.keys[id(anchor)] = key
        return known

    def _put(self, key: bytes, kind: EntryKind, tensors: dict[str, Tensor]) -> bool:
        room = self._store.reserve(key, kind, {name: TensorSpec.of(t) for name, t in tensors.items()}, {})
        if room is None:
            return False
        for name, tensor in tensors.items():
            room.tensors[name].copy_(tensor)
        return room.commit()
