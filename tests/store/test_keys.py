"""Two things that share a key by mistake read each other's cache; two that should share one, and do not, never hit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.keys import KeySpace, chain_hash
from lmcache_kvcmas.spans import Edge


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_keys_are_the_same_in_every_process_and_release() -> None:
    """Nodes and restarts find each other's entries by these bytes alone: changing them empties every cache."""
    content = chain_hash(chain_hash(None, tokens(1, 2, 3)), tokens(4, -5))
    assert content.hex() == "83e471594cf8f841f8253fe01feac3acb42f4704fdb327af8acabad2559fb914"
    assert (
        KeySpace("model", "salt").base(content).hex()
        == "1f8b8b012d8167c23881e15bc45f194a50b2653d572ef214153152bf16c933c8"
    )
    assert (
        KeySpace("model", "salt").pool(Edge("solver", "critic", 0)).hex()
        == "1f8b8b012d81b2145827b537172f5ddcb94ab2d7e1a555c92de02403b7e43981"
    )


def test_the_integer_type_of_tokens_does_not_matter() -> None:
    """The engine hands out lists, the index arrays; the same tokens are the same content."""
    values = [5, 2**31 - 1, 0]
    assert len({chain_hash(None, np.array(values, dtype=t)) for t in (np.int32, np.int64, np.uint32, ">i8")}) == 1
    assert chain_hash(None, np.array([1, 9, 2, 9, 3], dtype=np.int32)[::2]) == chain_hash(None, tokens(1, 2, 3))


def test_what_stands_in_front_is_part_of_a_chunks_name() -> None:
    """Equal tokens after different prefixes have different caches."""
    names = {chain_hash(front, tokens(7)) for front in (None, chain_hash(None, tokens(1)), chain_hash(None, tokens(2)))}
    assert len(names) == 3


@given(st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6), st.binary(max_size=6)), unique=True, max_size=8))
def test_model_salt_kind_and_content_never_run_into_one_another(fields: list[tuple[str, str, bytes]]) -> None:
    """A tenant whose salt ends as another's content begins must not meet it."""
    keys = [KeySpace(model, salt).key(kind, content) for model, salt, content in fields for kind in EntryKind]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)


def test_edges_whose_names_run_together_have_pools_of_their_own() -> None:
    """An agent called `ab` with `c` must not be corrected by what `a` with `bc` has learned."""
    space = KeySpace("model")
    edges = [Edge("ab", "c", 0), Edge("a", "bc", 0), Edge("ab", "c", 1), Edge("a", "b", 10), Edge("c", "ab", 0)]
    assert len({space.pool(edge) for edge in edges}) == len(edges)
