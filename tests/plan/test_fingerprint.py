"""Winnowing. Lost otherwise: reuse, wherever a shared run would not be found, or only by one of two nodes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_kvcmas.fingerprint import GUARANTEE, fingerprint, prefix_fingerprints

POSITIONS = [1, 28, 37, 42, 91, 96, 116, 127, 148]
HASHES = [340994625325356305, 771688975972104572]
PREFIX = 5847815082177011827


def tokens_of(seed: int, n: int, vocabulary: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, n).astype(np.int32)


@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([1, 2, 5, 1000, 50_000]),
    before=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    after=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    length=st.integers(GUARANTEE, 300),
)
@settings(max_examples=200, deadline=None)
def test_a_shared_run_of_64_always_shares_a_fingerprint_at_the_same_place(seed, vocabulary, before, after, length):
    run = tokens_of(seed, length, vocabulary)
    kept = []
    for i in (0, 1):
        around = [tokens_of(seed + 1 + i + k, n, vocabulary) for k, n in ((2, before[i]), (4, after[i]))]
        hashes, positions = fingerprint(np.concatenate([around[0], run, around[1]]))
        kept.append({(h, p - before[i]) for h, p in zip(hashes.tolist(), positions.tolist(), strict=True)})
    assert any(0 <= place <= length - 16 for _, place in kept[0] & kept[1])


def test_the_same_on_every_node():
    """These numbers were computed once; another process, another day, must find records by them."""
    tokens = (np.arange(200) * 7919 % 49152).astype(np.int32)
    hashes, positions = fingerprint(tokens, "tenant")
    prefixes, lengths = prefix_fingerprints(tokens, "tenant")
    assert positions.tolist() == POSITIONS
    assert [int(h) for h in hashes[:2]] == HASHES
    assert lengths.tolist() == [16, 32, 48, 64, 128, 192]
    assert int(prefixes[0]) == PREFIX


def test_salts_share_nothing():
    tokens = tokens_of(1, 5000, 50_000)
    for family in (fingerprint, prefix_fingerprints):
        a, b = family(tokens, "a"), family(tokens, "b")
        assert len(a.hashes) > 50
        assert not set(a.hashes.tolist()) & set(b.hashes.tolist())
    assert not set(fingerprint(tokens).hashes.tolist()) & set(prefix_fingerprints(tokens).hashes.tolist())


def test_few_are_kept():
    """Lost otherwise: memory; theory says 2 in 50 for random text (Schleimer et al., section 3)."""
    assert 0.038 <= len(fingerprint(tokens_of(1, 100_000, 50_000)).hashes) / 100_000 <= 0.042


@given(tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70))
@settings(deadline=None)
def test_any_tokens_are_fine(tokens):
    """Placeholders of images may be any number."""
    array = np.array(tokens, np.int32)
    assert (len(fingerprint(array).hashes) > 0) == (len(tokens) >= GUARANTEE)
    assert (len(prefix_fingerprints(array).hashes) > 0) == (len(tokens) >= 16)


@given(seed=st.integers(0, 2**32), n=st.integers(16, 400), cut=st.integers(16, 400))
@settings(deadline=None)
def test_prefix_hashes_depend_on_the_prefix_only(seed, n, cut):
    """Lost otherwise: an agent's own prefix would not be found again once its prompt has grown."""
    tokens = tokens_of(seed, n, 50_000)
    whole, lengths = prefix_fingerprints(tokens)
    part, _ = prefix_fingerprints(tokens[:cut])
    assert part.tolist() == whole[lengths <= cut].tolist()
    assert len(set(whole.tolist())) == len(whole)
