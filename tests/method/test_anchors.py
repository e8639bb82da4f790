"""What an edge remembers, and what it forgets."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lmcache_kvcmas.anchors import Anchor, AnchorPool, Caches, kept_rows
from lmcache_kvcmas.errors import EntryError

Make = Callable[..., Anchor]


def test_at_most_keep_tokens_evenly_spread(run: Callable[..., tuple[Caches, Caches]]) -> None:
    """A long context must not fill the pool with its beginning, nor cost more than a short one."""
    anchor = Anchor.learn(*run(0, 1000), keep=256, offset=7)
    offsets = anchor.offsets - 7
    assert anchor.tokens == 256
    assert (int(offsets[0]), int(offsets[-1])) == (0, 999)
    assert set((offsets[1:] - offsets[:-1]).tolist()) <= {3, 4, 5}
    assert torch.equal(kept_rows(10, 256), torch.arange(10))


def test_rows_and_norms_belong_to_the_kept_tokens(run: Callable[..., tuple[Caches, Caches]]) -> None:
    """Norms are those of the delta as it is held, which is what predictions mix: spread is never negative then."""
    base, delta = run(0, 60)
    anchor = Anchor.learn(base, delta, rank=2, keep=30, dtype=torch.float32)
    rows = anchor.offsets.long()
    for i in range(3):
        torch.testing.assert_close(anchor.norm2_k[i], anchor.delta_k.expand(i).square().sum(1))
    full = Anchor.learn(base, delta, rank=99, keep=30, dtype=torch.float32)
    assert torch.equal(full.delta_k.expand(1), delta.k[1, rows])
    torch.testing.assert_close(full.norm2_v, delta.v[:, rows].square().sum(2))
    assert torch.equal(full.base_v.expand(2), base.v[2, rows])


def test_shapes_that_differ_are_named() -> None:
    a, b = torch.zeros(2, 5, 4), torch.zeros(2, 6, 4)
    with pytest.raises(ValueError, match="one shape"):
        Anchor.learn(Caches(a, a), Caches(b, b))
    with pytest.raises(ValueError, match="T >= 1"):
        Anchor.learn(Caches(a[:, :0], a[:, :0]), Caches(a[:, :0], a[:, :0]))


@pytest.mark.parametrize("tokens", [6, 60])
def test_round_trip_through_tensors(anchor: Make, tokens: int) -> None:
    """An anchor from the store must predict what the one that was learned predicts, whole (6 tokens) or factored."""
    one = anchor(0, tokens)
    again = Anchor.from_tensors(one.tensors())
    assert again.tensors().keys() == one.tensors().keys()
    assert all(torch.equal(t, one.tensors()[name]) for name, t in again.tensors().items())
    assert again.nbytes == one.nbytes == sum(t.nbytes for t in one.tensors().values())


@pytest.mark.parametrize(
    "damage",
    [
        {"offsets": None},
        {"offsets": torch.zeros(30, dtype=torch.int32)},
        {"offsets": torch.arange(30)},
        {"offsets": torch.arange(-1, 29, dtype=torch.int32)},
        {"norm2_k": torch.zeros(3, 29)},
        {"base_k.u": torch.zeros(3, 29, 8)},
        {"delta_v.v": torch.zeros(3, 8, 23)},
        {"delta_v.w": torch.zeros(1)},
        {"stranger": torch.zeros(1)},
    ],
)
def test_a_damaged_anchor_is_a_miss(anchor: Make, damage: dict[str, torch.Tensor | None]) -> None:
    tensors = {k: v for k, v in {**anchor(0, 30).tensors(), **damage}.items() if v is not None}
    with pytest.raises(EntryError):
        Anchor.from_tensors(tensors)


def test_the_least_used_goes_and_the_newest_stays(anchor: Make) -> None:
    """Evicting the wrong one loses what the edge's texts need."""
    pool = AnchorPool(3)
    first, second, third, fourth, fifth = (anchor(i) for i in range(5))
    assert [pool.add(a) for a in (first, second, third)] == [None, None, None]
    assert pool.credit(torch.tensor([0.5, 0.1, 0.4]))
    assert pool.add(fourth) is second
    assert pool.anchors == (first, third, fourth)
    assert pool.add(fifth) is fourth  # it had its chance: no prediction used it
    pool.check_integrity()
    assert len(pool) == 3


def test_without_use_the_oldest_goes(anchor: Make) -> None:
    pool = AnchorPool(2)
    first, second, third = (anchor(i) for i in range(3))
    pool.add(first), pool.add(second)
    assert pool.add(third) is first


def test_old_merit_fades(anchor: Make) -> None:
    """Texts change: an anchor that was popular once must not block the pool for ever."""
    pool = AnchorPool(2)
    old = anchor(0)
    pool.add(old)
    pool.credit([8.0])
    for seed in range(1, 20):
        pool.add(anchor(seed))
        pool.credit([0.0, 1.0])
        if old not in pool.anchors:
            break
    assert old not in pool.anchors


def test_credit_for_another_version_is_not_booked(anchor: Make) -> None:
    """A prediction that began before an eviction must not credit the wrong anchors."""
    pool = AnchorPool(2)
    pool.add(anchor(0)), pool.add(anchor(1))
    version = pool.version
    pool.add(anchor(2))
    assert not pool.credit([1.0, 1.0], version)
    assert not pool.credit([1.0, 1.0, 1.0])
    assert pool.mass == (0.0, 0.0)
    assert pool.credit([1.0, 1.0], pool.version)


def test_an_anchor_of_another_model_is_refused(anchor: Make) -> None:
    pool = AnchorPool()
    one = anchor(0)
    pool.add(one)
    with pytest.raises(ValueError, match="does not fit"):
        pool.add(replace(one, delta_k=one.delta_k.rows(0, 30).__class__(torch.zeros(2, 30, 24), None)))
    with pytest.raises(ValueError, match="edge_capacity is 0"):
        AnchorPool(0)


def test_readers_see_whole_states_while_another_thread_learns(anchor: Make) -> None:
    """Learning runs beside serving: a torn pool would mix one version's anchors with another's masses."""
    anchors = [anchor(i, 6) for i in range(4)]
    pool = AnchorPool(3)
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            state = pool.state
            if len(state.anchors) != min(state.version, 3) or len(set(map(id, state.anchors))) != len(state.anchors):
                wrong.append(state)
            pool.credit([0.1] * len(state.anchors), state.version)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(2000):
        pool.add(replace(anchors[i % 4]))
    stop.set()
    reader.join()
    pool.check_integrity()
    assert wrong == []
    assert pool.version == 2000
