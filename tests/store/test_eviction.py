"""What memory gives up first, and that nothing is ever stuck in it."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from small_store import MIB, OpenStore, holds, put

from lmcache_kvcmas.connectors.eviction import EntryPolicy
from lmcache_kvcmas.entries import EntryKind


@dataclass
class Held:
    can_evict: bool = True


def test_deltas_go_first_then_bases_that_served_once() -> None:
    policy, cache = EntryPolicy(), {}
    for name in ("base 1", "anchor 1", "delta 1", "base 2", "delta 2", "base 3"):
        policy.expect(name, EntryKind(name.split()[0]))
        cache[name] = Held()
        policy.update_on_put(name)
    policy.update_on_hit("base 1", cache)
    policy.update_on_hit("delta 1", cache)
    order = ["delta 2", "delta 1", "base 2", "base 3", "base 1", "anchor 1"]
    assert policy.get_evict_candidates(cache, 9) == order
    cache["delta 2"].can_evict = False
    assert policy.get_evict_candidates(cache, 1) == ["delta 1"], "what is being read is passed by"


def test_bases_that_served_often_do_not_keep_all_others_out() -> None:
    """Lost otherwise: yesterday's contexts, each read twice, would leave no room for today's."""
    policy, cache = EntryPolicy(), {}
    for n in range(10):
        policy.expect(n, EntryKind.BASE)
        cache[n] = Held()
        policy.update_on_put(n)
        policy.update_on_hit(n, cache)
    policy.expect("new", EntryKind.BASE)
    cache["new"] = Held()
    policy.update_on_put("new")
    assert policy.get_evict_candidates(cache, 20).index("new") > 0


@given(
    st.lists(st.tuples(st.sampled_from(["put", "hit", "evict", "remove", "read"]), st.integers(0, 12)), max_size=60),
    st.lists(st.sampled_from(list(EntryKind)), min_size=13, max_size=13),
)
def test_everything_that_can_go_is_found_exactly_once(steps: list[tuple[str, int]], kinds: list[EntryKind]) -> None:
    """LMCache does not say when it has evicted what it was given; an entry that is forgotten would stay for ever."""
    policy = EntryPolicy()
    cache: dict[int, Held] = {}
    for what, n in steps:
        if what == "put" and n not in cache:
            policy.expect(n, kinds[n])
            cache[n] = Held()
            policy.update_on_put(n)
        elif what == "hit" and n in cache:
            policy.update_on_hit(n, cache)
        elif what == "evict":
            for key in policy.get_evict_candidates(cache, 1):
                del cache[key]
        elif what == "remove" and n in cache:
            del cache[n]
            policy.update_on_force_evict(n)
        elif what == "read" and n in cache:
            cache[n].can_evict = not cache[n].can_evict
    found = policy.get_evict_candidates(cache, 99)
    assert sorted(found) == sorted(n for n, held in cache.items() if held.can_evict)
    ranks = {EntryKind.DELTA: 0, EntryKind.BASE: 1}
    order = [ranks.get(kinds[n], 2) for n in found]
    assert order == sorted(order)


def test_a_full_store_gives_up_deltas_before_bases(open_small: OpenStore) -> None:
    """The same in LMCache's own tier."""
    store = open_small(cpu=8 * MIB)
    for n in range(4):
        assert put(store, n, kind=EntryKind.BASE)
        assert put(store, 10 + n, kind=EntryKind.DELTA) or n > 2
    for n in range(4, 7):
        assert put(store, n, kind=EntryKind.BASE)
    assert all(holds(store, n) for n in range(4)), "older than every delta, and still there"
    assert not any(holds(store, 10 + n, EntryKind.DELTA) for n in range(4))
