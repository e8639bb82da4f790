"""Bounded memory of the workers and the scheduler: what is over budget goes, and nothing points at what is gone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_kvcmas.hot import HotRun, HotTier
from lmcache_kvcmas.library import Library
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.spans import Piece


def run(tokens: int) -> HotRun:
    return HotRun(torch.zeros(1, tokens, 4), torch.zeros(1, tokens, 4), 0)  # 32 bytes a token


def test_the_least_recently_used_run_goes_first() -> None:
    hot = HotTier(32 * 30)
    for name in (b"a", b"b", b"c"):
        hot.put(name, run(10))
    assert hot.get(b"a") is not None
    hot.put(b"d", run(10))
    assert [name for name in (b"a", b"b", b"c", b"d") if hot.get(name)] == [b"a", b"c", b"d"]
    hot.put(b"e", run(31))
    assert hot.get(b"e") is None, "larger than the budget: not kept, and nothing else pays for it"
    assert hot.get(b"d") is not None


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40))))
def test_the_budget_of_the_hot_tier_holds(puts: list[tuple[int, int]]) -> None:
    hot = HotTier(32 * 60)
    for name, tokens in puts:
        hot.put(bytes([name]), run(tokens))
        hot.check_integrity()
    hot.clear()
    assert hot.nbytes == 0


def record(name: int, *chunks: bytes, delta: bytes | None = None) -> Record:
    tokens = np.arange(1000 * name, 1000 * name + 100 * len(chunks), dtype=np.int32)
    pieces = tuple(Piece(100 * i, 100 * i + 100, chunk, 0, delta) for i, chunk in enumerate(chunks))
    return Record(bytes([name]) * 32, tokens, len(tokens), pieces, sequence=name)


def test_a_record_that_lost_an_entry_serves_nobody() -> None:
    library = Library(10)
    shared, own, delta = b"shared", b"own", b"delta"
    library.add(record(1, shared, own))
    library.add(record(2, shared))
    library.add(record(3, own, delta=delta))
    assert library.lose({delta, b"never heard of"}) == 1
    assert library.lose({own}) == 1
    assert library.match(record(1, shared).tokens, "") == ()
    assert len(library.match(record(2, shared).tokens, "")) == 1
    library.check_integrity()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_both_sides_of_the_library_agree(steps: list[tuple[bool, int]]) -> None:
    library = Library(4)
    for add, n in steps:
        if add:
            library.add(record(n, bytes([n % 4]), bytes([n])))
        else:
            library.lose({bytes([n])})
        library.check_integrity()
    assert len(library) <= 4


def test_sequences_rise() -> None:
    library = Library(1)
    assert library.next_sequence() < library.next_sequence()


@pytest.mark.parametrize("budget", [0, 10])
def test_no_budget_means_no_hot_tier(budget: int) -> None:
    hot = HotTier(budget)
    hot.put(b"a", run(1))
    assert hot.get(b"a") is None
