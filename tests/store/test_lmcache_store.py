"""The CPU tier: real LMCache storage, real eviction."""

import logging
import threading
import time

import pytest
import torch
from small_store import MIB, OpenStore, holds, key, put

from lmcache_kvcmas.connectors.lmcache_store import LMCacheStore
from lmcache_kvcmas.entries import EntryKind, Owner, TensorSpec
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.store import MissCause


def damage(store: LMCacheStore, n: int) -> None:
    """Flips one byte in the store's own memory."""
    lease = store.get(key(n), EntryKind.BASE)
    assert lease is not None
    with lease:
        lease.tensors["x"][12345] ^= 1


def test_an_entry_comes_back_whole_and_uncopied(open_small: OpenStore) -> None:
    """What an agent left is what the next one reads, straight from the tier's memory."""
    store = open_small()
    specs = {"k": TensorSpec((2, 16, 8), torch.bfloat16), "rows": TensorSpec((3,), torch.int32)}
    reservation = store.reserve(key(1), EntryKind.BASE, specs, {"tokens": 16, "agent": "solver"})
    assert reservation is not None
    reservation.tensors["k"].copy_(torch.arange(256).view(2, 16, 8))
    reservation.tensors["rows"].copy_(torch.tensor([3, 1, 2]))
    where = reservation.tensors["k"].data_ptr()
    assert not store.contains(key(1)), "visible before the commit"
    assert store.get(key(1), EntryKind.BASE) is None
    assert reservation.commit()
    with store.get(key(1), EntryKind.BASE) as lease:  # type: ignore[union-attr]
        assert torch.equal(lease.tensors["k"].float(), torch.arange(256).view(2, 16, 8).bfloat16().float())
        assert lease.tensors["rows"].tolist() == [3, 1, 2]
        assert lease.tensors["k"].data_ptr() == where
        assert dict(lease.meta) == {"tokens": 16, "agent": "solver"}
    stats = store.stats()
    assert (stats.entries, stats.stored, stats.hits, stats.leased) == (1, 1, 1, 0)
    assert stats.misses == {MissCause.ABSENT: 1}


def test_of_two_entries_with_one_key_the_first_stays_but_of_pools_the_last(open_small: OpenStore) -> None:
    """Two requests may store the same content; an edge's list of anchors changes, and an old one must not come back."""
    store = open_small()
    assert put(store, 1, value=1)
    assert put(store, 1, value=2)
    assert holds(store, 1, value=1)
    assert put(store, 2, kind=EntryKind.POOL, value=1)
    assert put(store, 2, kind=EntryKind.POOL, value=2)
    assert holds(store, 2, kind=EntryKind.POOL, value=2)
    assert store.stats().entries == 2


def test_an_abandoned_reservation_gives_its_memory_back(open_small: OpenStore) -> None:
    """A capture that is broken off must not cost memory for the rest of the server's life."""
    store = open_small()
    before = store.stats()
    for _ in range(50):
        reservation = store.reserve(key(1), EntryKind.BASE, {"x": TensorSpec((MIB,), torch.uint8)}, {})
        assert reservation is not None
        reservation.abandon()
        reservation.abandon()
        assert not reservation.commit()
    assert store.stats() == before


def test_the_budget_holds_and_what_it_pushes_out_is_a_miss_that_is_reported(open_small: OpenStore) -> None:
    """Memory beyond the budget is the engine's; a plan on an entry that has gone costs a recompute."""
    store = open_small(cpu=8 * MIB)
    reported: list[bytes] = []
    for n in range(40):
        assert put(store, n)
        assert store.stats().bytes_used <= 8 * MIB
        reported += store.take_evicted()
    there = {n for n in range(40) if holds(store, n)}
    assert there == {n for n in range(40) if store.contains(key(n))}
    # An entry of 1 MiB takes a header more, and 4 KiB pages: seven of them go into 8 MiB.
    assert there == set(range(33, 40))
    assert sorted(reported) == [key(n) for n in range(33)]
    stats = store.stats()
    assert (stats.evictions, stats.entries, stats.misses[MissCause.ABSENT]) == (33, 7, 33)
    assert store.take_evicted() == []


def test_what_is_used_stays(open_small: OpenStore) -> None:
    """A context that every agent reads must outlive those that nobody asks for; LMCache's get alone is no use."""
    store = open_small(cpu=8 * MIB)
    put(store, 0)
    for n in range(1, 30):
        put(store, n)
        assert holds(store, 0), f"evicted by {n}"


def test_a_lease_outlives_the_eviction_of_everything_else(open_small: OpenStore) -> None:
    """A hop that is being loaded must not have its source overwritten by another request's capture."""
    store = open_small(cpu=8 * MIB)
    put(store, 0)
    lease = store.get(key(0), EntryKind.BASE)
    assert lease is not None
    for n in range(1, 40):
        assert put(store, n)
    store.remove(key(0))
    for n in range(40, 80):
        assert put(store, n)
    assert torch.all(lease.tensors["x"] == 0)
    used = store.stats().bytes_used
    lease.release()
    lease.release()
    assert store.stats().bytes_used < used
    assert not store.contains(key(0))


def test_no_room_is_said_at_once_and_costs_nobody_an_entry(open_small: OpenStore) -> None:
    """LMCache by default waits for room, without an end; and it would evict all there is for what can never fit."""
    store = open_small(cpu=8 * MIB)
    leases = []
    for n in range(5):
        put(store, n)
        leases.append(store.get(key(n), EntryKind.BASE))
    put(store, 5)
    started = time.monotonic()
    assert not put(store, 6, size=4 * MIB)
    assert not put(store, 7, size=100 * MIB)
    assert time.monotonic() - started < 0.5  # measured: 0.0004 s; LMCache would wait, without an end
    assert all(holds(store, n) for n in range(6))
    assert store.stats().refused == 2
    for lease in leases:
        assert lease is not None
        lease.release()
    assert put(store, 6, size=4 * MIB)
    assert holds(store, 6)


def test_a_damaged_entry_is_a_miss_counted_said_once_and_replaceable(
    open_small: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong is never acceptable: neither a flipped bit as a cache, nor a dead key that blocks its successor."""
    store = open_small()
    with caplog.at_level(logging.WARNING):
        for n in (1, 2):
            put(store, n)
            damage(store, n)
            assert not holds(store, n)
            assert not store.contains(key(n))
    assert store.stats().misses[MissCause.DAMAGED] == 2
    assert len([record for record in caplog.records if "damaged" in record.getMessage()]) == 1
    assert store.take_evicted() == [key(1), key(2)]
    assert put(store, 1)
    assert holds(store, 1)


def test_another_kind_or_another_models_entry_is_a_miss(open_small: OpenStore) -> None:
    """After a change of the model, old entries under an equal key must not be attended to."""
    store = open_small()
    put(store, 1)
    other = LMCacheStore(store._manager, Owner("model-b"), store._cpu, None, None)
    assert other.get(key(1), EntryKind.BASE) is None
    assert other.stats().misses == {MissCause.FOREIGN: 1}
    put(store, 2)
    assert not holds(store, 2, kind=EntryKind.DELTA)
    assert store.stats().misses == {MissCause.FOREIGN: 1}
    assert put(other, 1, value=9), "what answered wrongly blocks its successor"
    assert holds(other, 1, value=9)


def test_ranks_keep_their_parts_apart_under_one_key(open_small: OpenStore) -> None:
    """One scheduler plans with one key; each rank must find its own heads under it."""
    store = open_small(owner=Owner("model-a", 0, 2))
    second = LMCacheStore(store._manager, Owner("model-a", 1, 2), store._cpu, None, None)
    put(store, 1, value=10)
    assert second.get(key(1), EntryKind.BASE) is None
    put(second, 1, value=11)
    assert holds(store, 1, value=10)
    assert holds(second, 1, value=11)


def test_an_impossible_entry_is_an_error_of_the_caller(open_small: OpenStore) -> None:
    """And leaves nothing reserved."""
    store = open_small()
    with pytest.raises(EntryError, match="complex64"):
        store.reserve(key(1), EntryKind.BASE, {"x": TensorSpec((1,), torch.complex64)}, {})
    assert store.stats().leased == 0


def test_a_learner_may_write_while_the_engine_reads(open_small: OpenStore) -> None:
    """Learning runs beside serving; what is read must be one entry, never half of two."""
    store = open_small(cpu=8 * MIB)
    stop = threading.Event()
    seen, problems = [0], []

    def write(first: int) -> None:
        n = first
        while not stop.is_set():
            put(store, n % 24, size=MIB // 2)
            n += 1

    def read() -> None:
        n = 0
        while not stop.is_set():
            seen[0] += holds(store, n % 24)
            n += 1

    def run(job: object, *arguments: int) -> None:
        try:
            job(*arguments)  # type: ignore[operator]
        except BaseException as error:
            problems.append(error)

    threads = [
        threading.Thread(target=run, args=arguments) for arguments in ((write, 0), (write, 12), (read,), (read,))
    ]
    for thread in threads:
        thread.start()
    time.sleep(2)
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems
    stats = store.stats()
    # Measured on 2 cores with five other busy processes: 358 and 866.
    assert seen[0] > 20
    assert stats.evictions > 50
    assert stats.leased == 0
    assert stats.misses.keys() <= {MissCause.ABSENT}
    for n in range(24):
        store.remove(key(n))
    assert store.stats().bytes_used == 0, "references were lost"


def test_closing_is_quick_final_and_leaves_open_leases_readable(open_small: OpenStore) -> None:
    """A server that hangs on its way out is killed by its operator; one that frees memory under a reader crashes."""
    store = open_small(cpu=32 * MIB)
    put(store, 1, size=16 * MIB)
    lease = store.get(key(1), EntryKind.BASE)
    assert lease is not None
    writing = store.reserve(key(2), EntryKind.BASE, {"x": TensorSpec((MIB,), torch.uint8)}, {"n": 2})
    assert writing is not None
    started = time.monotonic()
    store.close()
    store.close()
    assert time.monotonic() - started < 5
    filler = [torch.full((16 * MIB,), 7, dtype=torch.uint8) for _ in range(8)]
    assert torch.all(lease.tensors["x"] == 1)
    writing.tensors["x"].fill_(2)
    writing.commit()
    lease.release()
    del filler
    assert store.get(key(1), EntryKind.BASE) is None
    assert not store.contains(key(1))
    assert not put(store, 3)
    store.remove(key(1))
    assert isinstance(store.take_evicted(), list)
    assert store.stats().leased == 0
