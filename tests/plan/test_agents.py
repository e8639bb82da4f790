"""Who is asking. Lost otherwise: anchors, split among names of one agent, or mixed among agents of one name."""

import numpy as np
import pytest

from lmcache_kvcmas.agents import AgentRegistry, alike, clean_name


def tokens_of(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(100, 49152, n).astype(np.int32)


def prompt(role: np.ndarray, seed: int, n: int = 200) -> np.ndarray:
    return np.concatenate([role, tokens_of(seed, n)])


def test_where_the_prefix_is_cut_does_not_matter():
    """The run in front of which it ends grows to the left by another amount for every pair of agents."""
    registry = AgentRegistry()
    role = tokens_of(1, 40)
    names = {registry.identify(prompt(role, 100 + i), cut) for i, cut in enumerate([34, 40, 29, 37, 40])}
    assert len(names) == 1
    assert registry.identify(prompt(tokens_of(2, 40), 100), 34) not in names


def test_a_short_cut_does_not_merge_roles_that_begin_alike():
    """The first pair may cut where roles begin to differ; what stands behind still tells them apart."""
    registry = AgentRegistry()
    start = tokens_of(1, 12)
    style, facts = (np.concatenate([start, tokens_of(i, 30)]) for i in (2, 3))
    a = registry.identify(prompt(style, 100), 12)
    assert registry.identify(prompt(facts, 101), 42) != registry.identify(prompt(style, 102), 42)
    assert registry.identify(prompt(style, 103), 42) == a


def test_a_known_role_is_compared_as_far_as_it_is_known():
    registry = AgentRegistry()
    start = tokens_of(1, 30)
    known = registry.identify(prompt(np.concatenate([start, tokens_of(2, 30)]), 100), 60)
    assert registry.identify(prompt(np.concatenate([start, tokens_of(3, 30)]), 101), 30) != known


def test_a_known_role_in_front_of_unshared_context_is_recognised():
    """Retrieval puts other documents in front of the shared one."""
    registry = AgentRegistry()
    role = tokens_of(1, 40)
    known = registry.identify(prompt(role, 100), 40)
    assert registry.identify(prompt(role, 101, 900), 700) == known


def test_hint_first_then_found_by_its_prefix():
    registry = AgentRegistry()
    role = tokens_of(1, 40)
    assert registry.identify(prompt(role, 100), 40, "critic") == "critic"
    assert registry.identify(prompt(role, 101), 36) == "critic"
    assert registry.identify(prompt(tokens_of(2, 40), 101), 40, "critic") == "critic", "hints are believed as names"
    assert registry.identify(prompt(role, 102), 40) == "critic"


def test_salts_have_agents_of_their_own():
    registry = AgentRegistry()
    role = tokens_of(1, 40)
    registry.identify(prompt(role, 100), 40, "critic", "a")
    assert registry.identify(prompt(role, 100), 40, None, "b") != "critic"


def test_bounds_hold_and_a_forgotten_agent_gets_its_name_again():
    registry = AgentRegistry(capacity=8, salts=3)
    first = registry.identify(prompt(tokens_of(1, 40), 100), 40)
    for i in range(2, 30):
        registry.identify(prompt(tokens_of(i, 40), 100), 40, None, "abcdef"[i % 6] if i % 2 else "")
    registry.check_integrity()
    assert registry.identify(prompt(tokens_of(1, 40), 105), 40) == first


@pytest.mark.parametrize("cut", [-5, 0, 1, 2, 10**6])
def test_strange_cuts_are_fine(cut):
    registry = AgentRegistry()
    for tokens in (np.empty(0, np.int32), tokens_of(1, 1), tokens_of(1, 5000)):
        assert registry.identify(tokens, cut) == registry.identify(tokens, cut)


def test_alike_allows_a_date_but_not_another_role():
    role = tokens_of(1, 400)
    dated = role.copy()
    dated[[20, 21, 24]] += 1
    longer = np.concatenate([role[:20], tokens_of(9, 6), role[22:]])
    assert alike(role, dated)
    assert alike(role, longer)
    assert not alike(role[:40], dated[:40]), "12% of a short prompt is more than a date"
    preamble = tokens_of(2, 2000)
    assert not alike(np.concatenate([preamble, role[:60]]), np.concatenate([preamble, role[60:120]]))
    assert alike(np.concatenate([preamble, role]), np.concatenate([preamble, dated]))
    empty = role[:0]
    assert alike(empty, empty)
    assert not alike(empty, role[:1])
    assert not alike(role[:1], dated[20:21])


@pytest.mark.parametrize("hint", ["", "a" * 65, "with space", "a@b", "../x", "ö", "\ud800", "x/other"])
def test_names_that_could_break_keys_are_hashed(hint):
    """Lost otherwise: a client's name would reach keys and labels as it is."""
    name = clean_name(hint)
    assert len(name) == 16
    assert set(name) <= set("0123456789abcdef")
    assert name == clean_name(hint)


def test_plain_names_stay():
    assert clean_name("critic_2.B-x") == "critic_2.B-x"
