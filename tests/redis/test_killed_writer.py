"""A node that dies any time leaves nothing half: what others are told of is whole, of the rest they hear nothing."""

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from redis_server import RedisServer
from shared_world import EDGE, KEYS, TENANT, World, anchor

from lmcache_kvcmas.anchors import Anchor
from lmcache_kvcmas.connectors.commands.catalogue import read_catalogue
from lmcache_kvcmas.connectors.commands.verify import verify
from lmcache_kvcmas.connectors.lmcache_store import LMCacheStore
from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_settings import RedisSettings
from lmcache_kvcmas.entries import EntryKind, Meta, TensorSpec
from lmcache_kvcmas.manifest import Needed, needed
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.shared import PoolNews, RecordNews
from lmcache_kvcmas.spans import Piece
from lmcache_kvcmas.store import NotHad

ROUNDS = 12
LATEST = 0.3  # seconds after the first write
TOKENS = 512

SHAPES = {EntryKind.BASE: (3, TOKENS, 16), EntryKind.DELTA: (3, TOKENS, 16)}
NAMES = {EntryKind.BASE: ("k", "v"), EntryKind.DELTA: ("k.full", "v.full")}
META: dict[EntryKind, Meta] = {EntryKind.BASE: {"position": 0}, EntryKind.DELTA: {}}


def value(key: bytes) -> float:
    """What an entry is filled with."""
    return float(key[-1])


def left_by(writer: int, n: int) -> Record:
    """A record of three chunks; the last is also under a difference."""
    chunks = [KEYS.base(b"%d %d %d" % (writer, n, i)) for i in range(3)]
    pieces = [Piece(TOKENS * i, TOKENS * (i + 1), chunk, 0) for i, chunk in enumerate(chunks)]
    delta = KEYS.delta(b"%d %d" % (writer, n))
    pieces.append(Piece(3 * TOKENS, 4 * TOKENS, chunks[2], 0, delta, 0, exact=False))
    tokens = np.arange(4 * TOKENS, dtype=np.int32) + n
    return Record(KEYS.record(b"%d %d" % (writer, n)), tokens, TOKENS, tuple(pieces), salt=TENANT)


def write(url: str, folder: str, writer: int, begun: Connection) -> None:
    """The process that is killed: entries, then their record, then an anchor, without an end."""
    store = World(Path(folder), url).store(f"writer{writer}", cpu=0.1)
    book = World(Path(folder), url).book(store)
    begun.send(True)
    n = 0
    while True:
        record = left_by(writer, n)
        if not all(put(store, entry) for entry in needed(record)):
            store.flush(1)  # memory is full of what waits to be written
            continue
        store.publish(record)
        book.learn(TENANT, EDGE, anchor(1000 * writer + n))
        n += 1


def put(store: LMCacheStore, entry: Needed) -> bool:
    specs = {name: TensorSpec(SHAPES[entry.kind], torch.float32) for name in NAMES[entry.kind]}
    room = store.reserve(entry.key, entry.kind, specs, META[entry.kind])
    if room is None:
        return False
    for tensor in room.tensors.values():
        tensor.fill_(value(entry.key))
    return room.commit()


def is_whole(store: LMCacheStore, entry: Needed) -> bool:
    lease = store.get(entry.key, entry.kind)
    if lease is None:
        return False
    with lease:
        right = all(bool((t == value(entry.key)).all()) for t in lease.tensors.values())
        return right and set(lease.tensors) == set(NAMES[entry.kind])


def test_a_writer_that_is_killed_leaves_nothing_half(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One process imports everything once, and is the parent of all that are killed.
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}:{Path(__file__).parent}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shared_world"])
    delays = random.Random(12)
    world = World(tmp_path, server)
    seen: set[bytes] = set()
    told_rounds = 0
    for writer in range(ROUNDS):
        told, tell = context.Pipe(duplex=False)
        child = context.Process(target=write, args=(server.url, str(tmp_path), writer, tell), daemon=True)
        child.start()
        tell.close()
        assert told.poll(120), "the writer did not begin"
        assert told.recv()
        time.sleep(delays.uniform(0, LATEST))
        child.kill()
        child.join()
        fresh = follow(world, writer, seen)
        told_rounds += fresh > 0
    assert told_rounds >= ROUNDS // 2, "hardly a writer lived long enough to tell of anything"
    client = RedisClient(RedisSettings(server.url, timeout_ms=10_000))
    verdict = verify(client, read_catalogue(client, "kvcmas"))
    client.close()
    assert verdict.damaged == ()
    assert verdict.checked[EntryKind.RECORD] >= len(seen)
    assert verdict.incomplete == {}, "nothing was evicted here"
    assert verdict.dangling == {}
    world.close()


def follow(world: World, number: int, seen: set[bytes]) -> int:
    """A node that starts now takes everything that it is told of, and was not there before."""
    reader = world.store(f"reader{number}", cpu=0.1)
    journal = world.journal(f"reader{number}", keep=100_000)
    assert journal.caught_up.wait(20)
    news = journal.take(1_000_000)
    fresh = [n.record for n in news if isinstance(n, RecordNews) and n.record.id not in seen]
    for record in fresh:
        assert reader.prefetch(needed(record)) == NotHad(), f"record {record.id.hex()} lacks what it needs"
        assert all(is_whole(reader, entry) for entry in needed(record))
        assert len(record.tokens) == 4 * TOKENS
    seen.update(record.id for record in fresh)
    if any(isinstance(n, PoolNews) for n in news):
        members = reader.shared.members(KEYS.pool(EDGE))  # type: ignore[union-attr]
        assert members
        anchors = [Needed(member, EntryKind.ANCHOR) for member in members]
        assert reader.prefetch(anchors) == NotHad(), "a pool names an anchor that is not there"
        for entry in anchors:
            lease = reader.get(*entry)
            assert lease is not None
            with lease:
                Anchor.from_tensors(lease.tensors)
    journal.close()
    reader.close()
    return len(fresh)
