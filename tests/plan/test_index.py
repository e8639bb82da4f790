"""The index of records. Lost otherwise: reuse that is not found, or another text's cache."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_kvcmas.index import RecordIndex
from lmcache_kvcmas.records import Record, Segment
from lmcache_kvcmas.spans import Piece


def tokens_of(seed: int, n: int, vocabulary: int = 50_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, n).astype(np.int32)


def record(name: str, tokens: np.ndarray, salt: str = "", sequence: int = 0) -> Record:
    return Record(name.encode(), tokens, len(tokens), (), salt=salt, sequence=sequence)


def check(matches, tokens):
    for m in matches:
        n = m.end - m.start
        assert np.array_equal(m.record.tokens[m.source_start : m.source_start + n], tokens[m.start : m.end])
        assert n >= (16 if m.is_prefix else 64)
        if m.start and m.source_start:
            assert m.record.tokens[m.source_start - 1] != tokens[m.start - 1], "maximal on the left"
        if m.end < len(tokens) and m.source_start + n < len(m.record.tokens):
            assert m.record.tokens[m.source_start + n] != tokens[m.end], "maximal on the right"


@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([16, 1000, 50_000]),
    here=st.integers(0, 700),
    there=st.integers(0, 700),
    length=st.integers(64, 600),
    tail=st.tuples(st.integers(0, 90), st.integers(0, 90)),
)
@settings(max_examples=150, deadline=None)
def test_every_shared_run_of_64_is_found_at_any_offset(seed, vocabulary, here, there, length, tail):
    run = tokens_of(seed, length, vocabulary)
    mine, other = (
        np.concatenate([tokens_of(seed + i, n, vocabulary), run, tokens_of(seed + i + 2, m, vocabulary)])
        for i, n, m in ((1, here, tail[0]), (2, there, tail[1]))
    )
    index = RecordIndex()
    index.add(record("r", other))
    matches = index.match(mine)
    check(matches, mine)
    assert any(m.start <= here and m.end >= here + length and m.start - m.source_start == here - there for m in matches)


def test_salts_never_meet():
    tokens = tokens_of(1, 500)
    index = RecordIndex()
    index.add(record("r", tokens, "a"))
    assert index.match(tokens, "a")
    assert not index.match(tokens, "b")
    assert not index.match(tokens)


def test_a_colliding_hash_finds_nothing(monkeypatch):
    """Lost otherwise: correctness, to whoever can construct a collision."""
    index = RecordIndex()
    index.add(record("r", tokens_of(1, 500)))
    other = tokens_of(2, 500)
    mine = {name: getattr(index_module(), name) for name in ("fingerprint", "prefix_fingerprints")}
    for name, real in mine.items():
        monkeypatch.setattr(index_module(), name, lambda tokens, salt, real=real: real(tokens_of(1, 500), salt))
    assert index._alignments(*mine["fingerprint"](tokens_of(1, 500))), "the hashes do propose an alignment"
    assert not index.match(other)


def test_salts_are_compared_even_when_hashes_agree(monkeypatch):
    """Lost otherwise: a tenant's privacy would hang on a hash."""
    for name in ("fingerprint", "prefix_fingerprints"):
        real = getattr(index_module(), name)
        monkeypatch.setattr(index_module(), name, lambda tokens, salt, real=real: real(tokens, "same"))
    index = RecordIndex()
    index.add(record("r", tokens_of(1, 500), "a"))
    assert index.match(tokens_of(1, 500), "a")
    assert not index.match(tokens_of(1, 500), "b")


def index_module():
    from lmcache_kvcmas import index

    return index


def test_the_most_recent_of_very_many_are_looked_at():
    """Lost otherwise: time, quadratic in the requests that share a role prompt."""
    index = RecordIndex()
    role = tokens_of(1, 200)
    for i in range(300):
        index.add(record(f"r{i}", np.concatenate([tokens_of(100 + i, 30), role, tokens_of(1000 + i, 80)]), sequence=i))
    matches = index.match(np.concatenate([tokens_of(5, 40), role]))
    assert {m.record.sequence for m in matches} == set(range(292, 300))
    index.check_integrity()


def test_the_longest_prefix_is_found_although_hundreds_share_the_beginning():
    """Lost otherwise: an agent that comes back would prefill its own prefix again."""
    index = RecordIndex()
    role = tokens_of(1, 200)
    own = np.concatenate([role, tokens_of(2, 900)])
    index.add(record("own", own))
    for i in range(300):
        index.add(record(f"r{i}", np.concatenate([role, tokens_of(1000 + i, 80)])))
    matches = index.match(np.concatenate([own, tokens_of(3, 50)]))
    assert matches[0].record.id == b"own"
    assert (matches[0].start, matches[0].end) == (0, 1100)


def test_budgets_hold_and_the_least_recently_matched_goes():
    """Lost otherwise: memory without bound, or the records in use."""
    index = RecordIndex(capacity=3, max_tokens=1000)
    texts = [tokens_of(i, 200) for i in range(9)]
    for i in range(3):
        assert index.add(record(f"r{i}", texts[i])) == ()
    index.match(texts[0])
    assert index.add(record("r3", texts[3])) == (b"r1",)
    assert b"r0" in index
    assert index.add(record("big", tokens_of(10, 700))) == (b"r2", b"r0")
    assert index.add(record("bigger", tokens_of(11, 1001))) == (b"bigger",)
    index.check_integrity()
    assert index.tokens == 900


def test_the_same_id_again_replaces():
    index = RecordIndex()
    index.add(record("r", tokens_of(1, 300)))
    index.add(record("r", tokens_of(2, 300)))
    assert len(index) == 1
    assert not index.match(tokens_of(1, 300))
    assert index.match(tokens_of(2, 300))
    index.check_integrity()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_history_keeps_the_tables_consistent(data):
    """Lost otherwise: the scheduler, to a posting whose record is gone."""
    index = RecordIndex(capacity=4, max_tokens=900)
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from("abcdefg"))
        # few seeds and letters, so that texts repeat, extend one another and contain themselves
        seed, n = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 400))
        tokens = tokens_of(seed, n, data.draw(st.sampled_from([1, 3, 50_000])))
        action = data.draw(st.sampled_from(["add", "discard", "match"]))
        if action == "add":
            index.add(record(name, tokens, data.draw(st.sampled_from(["", "s"]))))
        elif action == "discard":
            there = name.encode() in index
            assert index.discard(name.encode()) == there
        else:
            check(index.match(tokens), tokens)
        index.check_integrity()


@pytest.mark.parametrize("tokens", [np.zeros(20_000, np.int32), np.tile(np.arange(7, dtype=np.int32), 3000)])
def test_periodic_text_is_bounded(tokens):
    """Lost otherwise: the scheduler's time, to a prompt of spaces. 129 = 128 alignments and a prefix."""
    index = RecordIndex()
    index.add(record("r", tokens))
    matches = index.match(tokens)
    check(matches, tokens)
    assert matches[0].end == len(tokens)
    assert len(matches) <= 129


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": np.zeros(4, np.int64)}, "int32"),
        ({"tokens": np.zeros((2, 2), np.int32)}, "1-D"),
        ({"prompt_tokens": 5}, "prompt_tokens cannot be 5"),
        ({"pieces": (Piece(0, 5, b"c", 0),)}, "piece"),
        ({"pieces": (Piece(2, 4, b"c", 0), Piece(0, 2, b"c", 0))}, "ascending"),
        ({"segments": (Segment(0, 2, 0), Segment(3, 4, 0))}, "label each"),
        ({"segments": (Segment(0, 4, 0), Segment(4, 4, 0))}, "segment"),
    ],
)
def test_contradictory_records_are_refused(change, said):
    """Lost otherwise: another node's broken record would be read as if it were whole."""
    sound = {"id": b"r", "tokens": np.zeros(4, np.int32), "prompt_tokens": 4, "pieces": ()}
    Record(**sound)
    with pytest.raises(ValueError, match=said):
        Record(**{**sound, **change})
