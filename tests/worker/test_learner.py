"""From captured runs to entries and back: what the learner stores is what `fetch` gives, and pools outlive memory."""

from contextlib import ExitStack

import pytest
import torch

from lmcache_kvcmas.connectors.lmcache_store import LMCacheStore
from lmcache_kvcmas.edges import EdgeBook
from lmcache_kvcmas.entries import EntryKind, TensorSpec
from lmcache_kvcmas.hot import HotRun, HotTier
from lmcache_kvcmas.kernels.rope import RopeTable
from lmcache_kvcmas.keys import KeySpace
from lmcache_kvcmas.learner import Compress, Learn, Learner
from lmcache_kvcmas.lessons import Stretch, anchor_of
from lmcache_kvcmas.sources import Source, fetch
from lmcache_kvcmas.spans import Edge, Piece

LAYERS, TOKENS, HEADS, DIM = 4, 80, 2, 16
C = HEADS * DIM
EDGE = Edge("solver", "critic", 0)
CPU = torch.device("cpu")
CHUNK, DELTA = b"c" * 32, b"d" * 32


@pytest.fixture
def rope() -> RopeTable:
    return RopeTable(10000.0 ** (-torch.arange(0, DIM, 2) / DIM), DIM)


def book(store: LMCacheStore) -> EdgeBook:
    return EdgeBook(store, lambda tenant: KeySpace("a model", tenant), "attention", 3, CPU)


def keep(store: LMCacheStore, k: torch.Tensor, v: torch.Tensor, position: int) -> None:
    room = store.reserve(CHUNK, EntryKind.BASE, {"k": TensorSpec.of(k), "v": TensorSpec.of(v)}, {"position": position})
    assert room is not None
    room.tensors["k"].copy_(k)
    room.tensors["v"].copy_(v)
    assert room.commit()


def pair(rope: RopeTable, rank: int, seed: int = 0) -> tuple[HotRun, HotRun]:
    """A source run at position 7 and the destination's at 40, whose position-free difference has a given rank."""
    g = torch.Generator().manual_seed(seed)
    free_k, v = torch.randn(2, LAYERS, TOKENS, C, generator=g)
    left, right = torch.randn(LAYERS, TOKENS, rank, generator=g), torch.randn(LAYERS, rank, C, generator=g)
    delta = 0.1 * left @ right

    def cached(k: torch.Tensor, start: int) -> torch.Tensor:
        cos, sin = rope.span(start, start + TOKENS)
        return torch.stack([rope.rotate(layer, cos, sin) for layer in k])

    return HotRun(cached(free_k, 7), v, 7), HotRun(cached(free_k + delta, 40), v - delta, 40)


def test_a_compressed_run_comes_back(store: LMCacheStore, rope: RopeTable) -> None:
    """A rank-8 difference, stored at rank 8: the run is its source plus that, wherever it is read from."""
    source, run = pair(rope, 8)
    keep(store, source.k, source.v, source.position)
    learner = Learner(store, book(store), rope, rank=8, keep=64, budget=1 << 30)
    root = Stretch([Source(source.k, source.v, source.position)])
    assert learner.submit(Compress(DELTA, EDGE, run, root, ExitStack()))
    assert learner.drain(30)
    learner.close()
    assert learner.counts == {"compressed": 1}
    hot = HotTier(1 << 30)
    with ExitStack() as leases:
        got = fetch(store, hot, Piece(50, 70, CHUNK, 10, DELTA, 10, False), CPU, leases)
        assert got is not None
        for layer in range(LAYERS):
            k, v = got.free(rope, layer)
            cos, sin = rope.span(50, 70)
            want_k = rope.rotate(run.k[layer, 10:30], cos, sin, inverse=True)
            # fp32 factors of values up to 5: subspace iteration leaves 1e-5; bf16 would leave 1e-2.
            assert (k - want_k).abs().max() < 1e-3
            assert (v - run.v[layer, 10:30]).abs().max() < 1e-3
        hot.put(DELTA, run)
        direct = fetch(store, hot, Piece(50, 70, CHUNK, 10, DELTA, 10, False), CPU, leases)
        assert direct is not None
        assert direct.position == 50
        assert torch.equal(direct.k, run.k[:, 10:30])


def test_what_is_missing_is_a_miss(store: LMCacheStore, rope: RopeTable) -> None:
    source, _ = pair(rope, 8)
    keep(store, source.k, source.v, source.position)
    hot = HotTier(0)
    with ExitStack() as leases:
        assert fetch(store, hot, Piece(0, 10, CHUNK, 0), CPU, leases) is not None
        assert fetch(store, hot, Piece(0, 10, CHUNK, 0, DELTA), CPU, leases) is None, "no such delta"
        assert fetch(store, hot, Piece(0, 10, DELTA, 0), CPU, leases) is None, "no such chunk"
        assert fetch(store, hot, Piece(0, 10, CHUNK, TOKENS - 5), CPU, leases) is None, "rows beyond the chunk"


def test_an_edge_outlives_the_memory_of_its_pool(store: LMCacheStore, rope: RopeTable) -> None:
    """Pools are entries: another book (after eviction from memory, or in a new worker) predicts the same."""
    first = book(store)
    learner = Learner(store, first, rope, rank=8, keep=64, budget=1 << 30)
    for seed in range(5):
        source, run = pair(rope, 8, seed)
        stretch = Stretch([Source(source.k, source.v, source.position)])
        learner.submit(Learn("tenant", EDGE, run, stretch, 6, ExitStack()))
    assert learner.drain(60)
    learner.close()
    assert learner.counts == {"learned": 5}
    assert first.take_changed() == {("tenant", EDGE): 3}
    assert first.take_changed() == {}
    predictor, pool, known = first.ready("tenant", EDGE)
    again, read, _ = book(store).ready("tenant", EDGE)
    assert len(pool) == len(read) == known == 3
    k, v = torch.randn(2, 20, C)
    offsets = torch.arange(20)
    one, other = predictor.layer(2, k, v, offsets), again.layer(2, k, v, offsets)
    assert one.delta_k is not None
    assert other.delta_k is not None
    assert (one.delta_k - other.delta_k).abs().max() < 1e-5
    assert len(book(store).ready("another tenant", EDGE).pool) == 0, "what one tenant taught, no other uses"
    assert len(book(store).ready("tenant", EDGE._replace(slot=1)).pool) == 0


def test_what_does_not_fit_is_dropped_and_counted(store: LMCacheStore, rope: RopeTable) -> None:
    """A learner that cannot keep up costs lessons, not memory; leases are given back either way."""
    source, run = pair(rope, 8)
    learner = Learner(store, book(store), rope, rank=8, keep=64, budget=run.nbytes)
    closed: list[int] = []
    for n in range(20):
        leases = ExitStack()
        leases.callback(closed.append, n)
        stretch = Stretch([Source(source.k, source.v, source.position)])
        learner.submit(Learn("tenant", EDGE, run, stretch, 0, leases))
    assert learner.drain(60)
    learner.close()
    assert len(closed) == 20
    assert learner.counts["learned"] >= 1
    assert learner.counts["learned"] + learner.counts["dropped"] == 20


def test_a_failing_lesson_does_not_end_learning(store: LMCacheStore, rope: RopeTable) -> None:
    source, run = pair(rope, 8)
    learner = Learner(store, book(store), rope, rank=8, keep=64, budget=1 << 30)
    learner.submit(Learn("tenant", EDGE, run, Stretch([]), 0, ExitStack()))
    stretch = Stretch([Source(source.k, source.v, source.position)])
    learner.submit(Learn("tenant", EDGE, run, stretch, 0, ExitStack()))
    assert learner.drain(60)
    learner.close()
    assert learner.counts == {"failed": 1, "learned": 1}


def test_the_gate_hears_of_the_anchors_that_the_predictor_knows(store: LMCacheStore, rope: RopeTable) -> None:
    """One anchor agrees with itself (ê = 0): counting newer ones beside it would let an unjudged prediction pass."""
    edges = book(store)
    for seed in range(3):
        source, run = pair(rope, 8, seed)
        edges.learn(
            "tenant", EDGE, anchor_of(run, Stretch([Source(source.k, source.v, source.position)]), rope, 8, 64, 0)
        )
        if seed == 0:
            edges.prepare()
            assert edges.take_changed() == {("tenant", EDGE): 1}
    stale = edges.ready("tenant", EDGE)
    assert len(stale.pool) == 3
    assert stale.anchors == 1
    assert edges.take_changed() == {}, "not announced before it can be used"
    edges.prepare()
    assert edges.ready("tenant", EDGE).anchors == 3
    assert edges.take_changed() == {("tenant", EDGE): 3}
