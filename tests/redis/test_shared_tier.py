"""Two nodes and one Redis: entries, records and pools that one writes are the other's; nothing half-written is."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from redis_server import RedisServer
from shared_world import EDGE, KEYS, MODEL, TENANT, World, anchor, base, holds, plain, put, record, wait_for

from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_names import EntryName
from lmcache_kvcmas.connectors.redis_settings import RedisSettings
from lmcache_kvcmas.connectors.redis_trim import trim
from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.keys import KeySpace
from lmcache_kvcmas.manifest import Needed
from lmcache_kvcmas.shared import News, PoolNews, RecordNews
from lmcache_kvcmas.store import NotHad


@pytest.fixture
def world(tmp_path: Path, server: RedisServer) -> Iterator[World]:
    made = World(tmp_path, server)
    yield made
    made.close()


def test_what_one_node_stores_another_prefetches(world: World) -> None:
    first, second = world.store("first"), world.store("second")
    for n in range(4):
        put(first, base(n), value=n)
    assert first.flush(10)
    assert not holds(second, base(0), value=0), "a plain get never waits for the network"
    absent = Needed(KEYS.base(b"nobody's"), EntryKind.BASE)
    wanted = [Needed(base(n), EntryKind.BASE) for n in range(4)]
    assert second.prefetch([*wanted, absent]) == NotHad(gone=(absent,))
    assert all(holds(second, base(n), value=n) for n in range(4))
    assert second.prefetch(wanted) == NotHad(), "they are in memory now"
    assert second.stats().leased == 0
    assert first.stats().leased == 0


def test_an_entry_is_written_once(world: World) -> None:
    first, second = world.store("first"), world.store("second")
    put(first, base(1))
    assert first.flush(10)
    put(second, base(1))
    assert second.flush(10)
    assert second.stats().shared["there"] == 1
    assert second.stats().shared.get("written", 0) == 0


def test_damage_in_redis_is_a_miss_and_is_removed(world: World) -> None:
    first, second = world.store("first"), world.store("second")
    put(first, base(1))
    assert first.flush(10)
    (name,) = [key for key in plain(world).scan_iter() if EntryName.parse(key)]
    plain(world).setrange(name, 100_000, b"!")
    wanted = Needed(base(1), EntryKind.BASE)
    assert second.prefetch([wanted]) == NotHad(gone=(wanted,))
    assert second.flush(10)
    assert not plain(world).exists(name)
    assert not holds(second, base(1))


def test_a_record_is_told_after_its_entries_and_only_then(world: World) -> None:
    first, journal = world.store("first"), world.journal("second")
    put(first, base(1))
    put(first, base(2))
    first.publish(record(base(1), base(2), n=1))
    first.publish(record(base(1), base(3), n=2))  # 3 is nowhere
    assert first.flush(10)
    assert first.stats().shared["unpublished"] == 1
    wait_for(lambda: first.stats().shared["published"] == 1)
    news: list[News] = []
    wait_for(lambda: bool(news.extend(journal.take(9)) or news))
    time.sleep(0.1)
    news += journal.take(9)
    assert [n.record.id for n in news if isinstance(n, RecordNews)] == [KEYS.record(b"\x01")]
    (heard,) = [n.record for n in news if isinstance(n, RecordNews)]
    assert heard.pieces == record(base(1), base(2), n=1).pieces
    assert np.array_equal(heard.tokens, np.arange(32))


def test_what_was_left_before_a_node_started_is_heard(world: World) -> None:
    first = world.store("first")
    put(first, base(1), size=1000)
    for n in range(80):  # more than a batch
        first.publish(record(base(1), n=n))
    assert first.flush(20)
    late, own = world.journal("late"), world.journal("first")
    assert late.caught_up.wait(10)
    heard = [n.record.id for n in late.take(1000) if isinstance(n, RecordNews)]
    assert heard == [KEYS.record(bytes([n])) for n in range(80)], "oldest first"
    assert own.caught_up.wait(10)
    assert own.take(1000) == [], "its own are no news"


def test_a_record_waits_for_all_ranks(world: World) -> None:
    """Each rank holds its own heads; the record is of use when all of them have written theirs."""
    journal = world.journal("second", size=2)
    ranks = [world.store("first", rank, 2) for rank in (0, 1)]
    for store in ranks:
        put(store, base(1), size=1000)
    told = record(base(1))
    ranks[0].publish(told)
    assert ranks[0].flush(10)
    time.sleep(0.3)
    assert journal.take(9) == []
    ranks[1].publish(told)
    news: list[News] = []
    wait_for(lambda: bool(news.extend(journal.take(9)) or news))
    assert [type(n) for n in news] == [RecordNews]


def test_two_nodes_that_learn_at_once_lose_nothing_and_converge(world: World) -> None:
    stores = [world.store(name) for name in ("first", "second")]
    books = [world.book(store, capacity=8) for store in stores]

    def learn(i: int) -> None:
        for n in range(4):
            books[i].learn(TENANT, EDGE, anchor(10 * i + n))

    threads = [threading.Thread(target=learn, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        assert store.flush(10)
    for book in books:
        assert book.refresh(TENANT, EDGE)
        book.prepare()
    pools = [sorted(round(float(a.norm2_k.sum()), 3) for a in b.ready(TENANT, EDGE).pool.anchors) for b in books]
    assert len(pools[0]) == 8, "none of the four and four was lost"
    assert pools[0] == pools[1]
    assert [b.take_changed() for b in books] == [{(TENANT, EDGE): 8}] * 2
    assert not any(book.refresh(TENANT, EDGE) for book in books), "nothing new"


def test_a_full_pool_keeps_the_same_anchors_everywhere(world: World) -> None:
    stores = [world.store(name) for name in ("first", "second")]
    books = [world.book(store, capacity=3) for store in stores]
    for n in range(3):
        for i in (0, 1):
            books[i].learn(TENANT, EDGE, anchor(10 * i + n))
            assert stores[i].flush(10)
    for book in books:
        book.refresh(TENANT, EDGE)
        book.prepare()
    pools = [[round(float(a.norm2_k.sum()), 3) for a in b.ready(TENANT, EDGE).pool.anchors] for b in books]
    last = [round(float(anchor(seed).norm2_k.sum()), 3) for seed in (11, 2, 12)]
    assert pools == [last, last], "the latest three of both"
    left = [EntryName.parse(key) for key in plain(world).scan_iter()]
    assert sum(name is not None and name.kind is EntryKind.ANCHOR for name in left) == 3, "the others were removed"


def test_pools_are_announced(world: World) -> None:
    store, journal = world.store("first"), world.journal("second")
    world.book(store).learn(TENANT, EDGE, anchor(1))
    news: list[News] = []
    wait_for(lambda: bool(news.extend(journal.take(9)) or news))
    assert news == [PoolNews(TENANT, EDGE, 1)]


def test_what_was_learned_while_redis_was_away_gets_there(world: World) -> None:
    """Served from this node's memory meanwhile, and passed on later; not dropped by the first refresh."""
    store = world.store("first", timeout_ms=200)
    book = world.book(store)
    world.server.kill()
    book.learn(TENANT, EDGE, anchor(1))
    assert store.flush(10)
    assert len(book.ready(TENANT, EDGE).pool) == 1
    world.server.restart()

    def told() -> bool:
        book.tell()
        store.flush(5)
        return bool(store.stats().shared.get("joined"))

    wait_for(told, 15)
    other = world.book(world.store("second"))
    assert other.refresh(TENANT, EDGE)
    assert len(other.ready(TENANT, EDGE).pool) == 1


def test_a_server_that_was_emptied_does_not_empty_pools(world: World) -> None:
    store = world.store("first")
    book = world.book(store)
    for n in range(3):
        book.learn(TENANT, EDGE, anchor(n))
    assert store.flush(10)
    plain(world).flushall()
    book.learn(TENANT, EDGE, anchor(3))
    assert store.flush(10)
    assert store.shared is not None
    assert store.shared.members(KEYS.pool(EDGE)) != []
    book.refresh(TENANT, EDGE)
    assert len(book.ready(TENANT, EDGE).pool) == 4


def test_useful_anchors_stay(world: World) -> None:
    """Attention mass decides: an old anchor that predictions lean on outlives a newer one that they ignore."""
    store = world.store("first")
    book = world.book(store, capacity=2)
    for n in (0, 1):
        book.learn(TENANT, EDGE, anchor(n))
        assert store.flush(10)
    book.prepare()
    book.credit(book.ready(TENANT, EDGE), torch.tensor([9.0, 0.1]))
    book.tell()
    assert store.flush(10)
    other = world.book(world.store("second"), capacity=2)
    other.refresh(TENANT, EDGE)
    other.learn(TENANT, EDGE, anchor(2))
    assert other._store.flush(10)
    book.refresh(TENANT, EDGE)
    kept = [round(float(a.norm2_k.sum()), 3) for a in book.ready(TENANT, EDGE).pool.anchors]
    assert sorted(kept) == sorted(round(float(anchor(n).norm2_k.sum()), 3) for n in (0, 2))


def test_a_server_that_does_not_answer_has_lost_nothing(world: World) -> None:
    """Unreachable is not gone: records stay, and are of use again when the server is."""
    first, second = world.store("first"), world.store("second", timeout_ms=200)
    put(first, base(1))
    assert first.flush(10)
    wanted = Needed(base(1), EntryKind.BASE)
    world.server.stop()
    begun = time.monotonic()
    assert second.prefetch([wanted]) == NotHad(unreachable=(wanted,))
    assert time.monotonic() - begun < 0.4, "one time-out"
    begun = time.monotonic()
    for _ in range(5):
        assert second.prefetch([wanted]) == NotHad(unreachable=(wanted,))
    assert time.monotonic() - begun < 0.05, "then the breaker is open"
    world.server.go_on()
    wait_for(lambda: second.prefetch([wanted]) == NotHad(), 10)
    assert holds(second, base(1))


def test_tenants_share_nothing(world: World) -> None:
    """Keys that differ in the salt only are other keys: neither content nor a hit's timing tells of one another."""
    first, second = world.store("first"), world.store("second")
    mine, theirs = KeySpace(MODEL, "mine"), KeySpace(MODEL, "theirs")
    put(first, mine.base(b"x"))
    assert first.flush(10)
    assert second.prefetch([Needed(theirs.base(b"x"), EntryKind.BASE)]).gone
    assert second.prefetch([Needed(mine.base(b"x"), EntryKind.BASE)]) == NotHad()


@pytest.mark.parametrize("fault", ["kill", "stop", None])
def test_closing_takes_less_than_five_seconds(world: World, fault: str | None) -> None:
    store = world.store("first", timeout_ms=250)
    for n in range(6):
        put(store, base(n))
    if fault:
        getattr(world.server, fault)()
    for n in range(6, 12):
        put(store, base(n))
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < 5
    if fault == "stop":
        world.server.go_on()


def test_what_is_over_the_budget_goes_in_order(world: World) -> None:
    """Deltas before bases, the longest unused first; what others keep on the server is left alone."""
    store = world.store("first", ttl_seconds=1000)
    delta = KEYS.delta(b"x")
    for n in range(4):
        put(store, base(n), size=1 << 20)
    put(store, delta, EntryKind.DELTA, size=1 << 20)
    assert store.flush(10)
    redis = plain(world)
    redis.set("someone's", b"x" * (1 << 20))
    names = {EntryName.parse(key).key: key for key in redis.scan_iter("kvcmas:*") if EntryName.parse(key)}
    for n, life in ((2, 10), (0, 20), (1, 900), (3, 990)):
        redis.expire(names[base(n)], life)
    client = RedisClient(RedisSettings(world.server.url, timeout_ms=2000))
    assert trim(client, "kvcmas", 6 << 20) == 0
    assert trim(client, "kvcmas", (9 << 20) // 2) == 1, "the delta is enough"
    assert not redis.exists(names[delta])
    assert trim(client, "kvcmas", 3 << 20) == 2
    assert [redis.exists(names[base(n)]) for n in range(4)] == [0, 1, 0, 1]
    assert redis.exists("someone's")
    client.close()


def test_a_full_queue_drops_and_says_so(world: World) -> None:
    store = world.store("first", max_inflight_bytes="4MiB", timeout_ms=200)
    world.server.stop()
    for n in range(6):
        put(store, base(n), value=n)
    assert store.stats().shared["dropped_full"] >= 4
    assert all(holds(store, base(n), value=n) for n in range(6)), "this node has them all"
    world.server.go_on()
    assert store.flush(10)
    assert store.stats().leased == 0


def test_the_same_lesson_twice_is_two_anchors_of_one_entry(world: World) -> None:
    """When one of the two has to go, the entry stays for the other."""
    store = world.store("first")
    book = world.book(store, capacity=2)
    for seed in (0, 0, 1):
        book.learn(TENANT, EDGE, anchor(seed))
    assert len(world.book(store, capacity=2).ready(TENANT, EDGE).pool) == 2
