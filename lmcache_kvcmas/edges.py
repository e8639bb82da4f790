"""What is known of each edge: its anchor pool, and the predictor built from it. Pools live in the store as entries.

With a shared tier, the pool is what all nodes have learned together (``shared`` says how additions merge), and this
node's copy follows it: `refresh` takes over what others added, and anchors of our own that did not get there yet stay.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from lmcache_kvcmas.anchors import Anchor, AnchorPool
from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.keys import KEY_BYTES, KeySpace
from lmcache_kvcmas.manifest import Needed
from lmcache_kvcmas.predict import Predictor, build_predictor
from lmcache_kvcmas.shared import PoolNews
from lmcache_kvcmas.spans import Edge
from lmcache_kvcmas.store import EntryStore, put

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
    unshared: set[bytes] = field(default_factory=set)
    """Keys of anchors that are not known to be in the shared pool."""
    sharing: set[bytes] = field(default_factory=set)
    """Those of them that are on their way."""
    useful: set[bytes] = field(default_factory=set)
    """Keys of anchors that predictions leaned on since the shared pool was last told."""


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
        stored = put(self._store, key, EntryKind.ANCHOR, tensors, edge._asdict())
        evicted = known.pool.add(anchor)
        if stored:
            known.keys[id(anchor)] = key
        old = known.keys.pop(id(evicted), None) if evicted is not None else None
        if old is not None and old not in known.keys.values():  # the same lesson twice is two anchors of one key
            known.unshared.discard(old)
            self._store.remove(old)
        self._list(tenant, edge, known)
        if stored:
            self._share(tenant, edge, known, key)
        with self._lock:
            self._unprepared.add((tenant, edge))

    def refresh(self, tenant: str, edge: Edge) -> bool:
        """Take over what other nodes did to the edge's pool; True if that changed anything. Call `prepare` afterwards.

        Reads from the shared tier: not for the critical path.
        """
        shared = self._store.shared
        pool = self._keys_of(tenant).pool(edge)
        members = shared.members(pool) if shared is not None else None
        if members is None:
            return False
        with self._lock:
            known = self._find(tenant, edge)
        held = {key: a for a in known.pool.anchors if (key := known.keys.get(id(a))) is not None}
        wanted = [key for key in members[-self._max_anchors :] if key not in held]
        self._store.prefetch([Needed(key, EntryKind.ANCHOR) for key in wanted])
        new = {key: anchor for key in wanted if (anchor := self._read_anchor(key)) is not None}
        alone = [key for key in held if key not in members]
        # A pool that is not full has lost what is missing in it (a server that was restarted empty); a full one has
        # given it up.
        kept = [key for key in alone if key not in known.unshared and len(members) < self._max_anchors]
        own = [key for key in alone if key in known.unshared]
        order = [*kept, *(key for key in members if key in held or key in new), *own]
        order = order[-self._max_anchors :]
        fitting = _alike([(key, held.get(key) or new[key]) for key in order])
        if {key for key, _ in fitting} == set(held):
            return False
        known.pool.replace([anchor for _, anchor in fitting])
        known.keys = {id(anchor): key for key, anchor in fitting}
        known.unshared.intersection_update(known.keys.values())
        self._list(tenant, edge, known)
        with self._lock:
            self._unprepared.add((tenant, edge))
        return True

    def credit(self, ready: Ready, mass: Tensor) -> None:
        """Anchors that a used prediction leaned on, by attention mass ``[A]``: they stay the longest."""
        if not ready.pool.credit(mass, ready.predictor.version):
            return
        leaned = mass > mass.sum() / (2 * max(1, len(mass)))
        with self._lock:
            for known in self._known.values():
                if known.pool is ready.pool:
                    anchors = zip(known.pool.anchors, leaned.tolist(), strict=False)
                    # Asked once: the learner's thread may take a key out between two looks.
                    keys = [known.keys.get(id(a)) for a, used in anchors if used]
                    known.useful.update(key for key in keys if key is not None)

    def tell(self) -> None:
        """Pass on what the shared tier does not know yet: anchors that were of use, and those it missed."""
        shared = self._store.shared
        if shared is None:
            return
        with self._lock:
            names = list(self._known)
        for tenant, edge in names:
            known = self._known.get((tenant, edge))
            if known is None:
                continue
            useful, known.useful = known.useful, set()
            if useful:
                shared.touch(self._keys_of(tenant).pool(edge), sorted(useful))
            for key in known.unshared - known.sharing:
                if self._store.share(Needed(key, EntryKind.ANCHOR)):
                    self._share(tenant, edge, known, key)

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
        """The pool as this node's tiers have it; anchors that are gone or damaged are left out."""
        known = _Known(AnchorPool(self._max_anchors), {})
        lease = self._store.get(self._keys_of(tenant).pool(edge), EntryKind.POOL)
        if lease is None:
            return known
        with lease:
            listed = lease.tensors.get("anchors")
            whole = listed is not None and listed.dtype == torch.uint8 and listed.shape[1:] == (KEY_BYTES,)
            rows = listed.tolist() if listed is not None and whole else []
        read = [(key, self._read_anchor(key)) for key in map(bytes, rows[-self._max_anchors :])]
        fitting = _alike([(key, anchor) for key, anchor in read if anchor is not None])
        known.pool.replace([anchor for _, anchor in fitting])
        known.keys = {id(anchor): key for key, anchor in fitting}
        if self._store.shared is not None:
            known.unshared.update(known.keys.values())  # perhaps: to tell them again does no harm
        return known

    def _read_anchor(self, key: bytes) -> Anchor | None:
        entry = self._store.get(key, EntryKind.ANCHOR)
        if entry is None:
            return None
        with entry:
            try:
                return Anchor.from_tensors({name: t.clone() for name, t in entry.tensors.items()})
            except EntryError:
                return None

    def _list(self, tenant: str, edge: Edge, known: _Known) -> None:
        """Store the list last: a reader never finds a name in it that has no anchor."""
        names = [known.keys[id(a)] for a in known.pool.anchors if id(a) in known.keys]
        if names:
            listed = torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8).view(-1, KEY_BYTES)
            put(self._store, self._keys_of(tenant).pool(edge), EntryKind.POOL, {"anchors": listed}, edge._asdict())

    def _share(self, tenant: str, edge: Edge, known: _Known, key: bytes) -> None:
        shared = self._store.shared
        if shared is None:
            return
        known.unshared.add(key)
        known.sharing.add(key)

        def done(joined: bool) -> None:
            known.sharing.discard(key)
            if joined:
                known.unshared.discard(key)

        news = PoolNews(tenant, edge, len(known.pool.anchors))
        shared.join(news, self._keys_of(tenant).pool(edge), key, self._max_anchors, done)


def _alike(anchors: list[tuple[bytes, Anchor]]) -> list[tuple[bytes, Anchor]]:
    """Those that are of the last one's layers and channels: all, unless somebody stored nonsense."""
    forms = [(anchor.layers, anchor.channels) for _, anchor in anchors]
    return [pair for pair, form in zip(anchors, forms, strict=True) if form == forms[-1]]
