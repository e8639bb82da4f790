"""The shared tier on Redis: one queue that writes in order, batched reads, and the journal's writing half."""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from lmcache_kvcmas.connectors.redis_client import RedisClient, RedisUnavailable
from lmcache_kvcmas.connectors.redis_names import Names
from lmcache_kvcmas.connectors.redis_trim import Trimmer
from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.manifest import Needed, needed
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.shared import PoolNews

logger = logging.getLogger(__name__)

Fields = Mapping[bytes | str, bytes | str | int]

_BATCH_BYTES = 16 << 20  # of entries that are written in one round trip


@dataclass(frozen=True, slots=True, eq=False)
class _Put:
    name: str
    blob: memoryview
    release: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Anything else that has to happen in order."""

    what: str
    run: Callable[[], object]
    failed: Callable[[], None]
    """Called if it raised or was dropped."""


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """A line of the journal: the pool of an edge changed."""

    tenant: str
    source: str
    destination: str
    slot: int
    anchors: int


class Clock(Protocol):
    def __call__(self) -> float: ...


class RedisTier:
    """See ``shared.SharedTier``. One per worker; ``node`` tells this process' own journal lines from others'."""

    def __init__(
        self, client: RedisClient, names: Names, node: str, budget: int, keep: int, clock: Clock = time.time
    ) -> None:
        self.client, self._names, self._node = client, names, node
        self._budget, self._keep, self._clock = budget, keep, clock
        self._queue: queue.SimpleQueue[_Put | _Step | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._waiting = 0
        self._changed = threading.Condition()
        self._closed = False
        self.counts: Counter[str] = Counter()
        """``written``, ``there`` (another node was first), ``published``, ``joined``, and what was dropped."""
        self._trimmer: Trimmer | None = None
        self._writer = threading.Thread(target=self._write, name="kvcmas-redis-writer", daemon=True)
        self._writer.start()

    def keep_below(self, most: int) -> None:
        """Remove what was not used for the longest whenever our keys take more than ``most`` bytes."""
        self._trimmer = Trimmer(self.client, self._names.prefix, most, self.counts)

    def put(self, needed: Needed, blob: memoryview, release: Callable[[], None]) -> None:
        with self._changed:
            if self._closed or (self._waiting_bytes and self._waiting_bytes + blob.nbytes > self._budget):
                self.counts["dropped_full"] += 1
                full = True
            else:
                full = False
                self._waiting += 1
                self._waiting_bytes += blob.nbytes
                # Under the lock: what came behind the end of the queue would be let go of by nobody.
                self._queue.put(_Put(self._names.entry(needed.kind, needed.key), blob, release))
        if full:
            release()

    def read(
        self, wanted: Sequence[Needed], allocate: Callable[[int, int], memoryview | None]
    ) -> list[bool | None] | None:
        try:
            return self.client.read_known([self._names.entry(w.kind, w.key) for w in wanted], allocate)
        except RedisUnavailable:
            return None
        except Exception:  # of the memory, say: the caller has what it allocated to give back
            logger.exception("kvcmas: Redis: a read failed")
            return None

    def remove(self, needed: Needed) -> None:
        name = self._names.entry(needed.kind, needed.key)
        self._later("removed", lambda: self.client.remove_many([name]))

    def publish(self, record: Record, blob: memoryview) -> None:
        names = [self._names.entry(n.kind, n.key) for n in needed(record)]
        name = self._names.entry(EntryKind.RECORD, record.id)
        rank, size = self._names.owner.tp_rank, self._names.owner.tp_size
        line: Fields = {"node": self._node, "record": record.id, "rank": rank, "of": size}

        def run() -> None:
            if not all(self.client.exists_many(names)):
                self.counts["unpublished"] += 1
                return
            if rank == 0:
                self.client.put_many([(name, blob)])
            self.client.append(self._names.journal, line, self._keep)
            self.counts["published"] += 1

        self._later("publish", run)

    def join(self, news: PoolNews, pool: bytes, anchor: bytes, keep: int, done: Callable[[bool], None]) -> None:
        name = self._names.entry(EntryKind.POOL, pool)
        line = Announcement(news.tenant, *news.edge, news.anchors)

        def run() -> None:
            if not all(self.client.exists_many([self._names.entry(EntryKind.ANCHOR, anchor)])):
                self.counts["unjoined"] += 1
                done(False)
                return
            gone = self.client.set_add(name, anchor, self._clock(), keep)
            self.client.hash_set(self._names.edges, name, msgspec.msgpack.encode(line))
            told: Fields = {"node": self._node, "pool": msgspec.msgpack.encode(line), "rank": self._names.owner.tp_rank}
            self.client.append(self._names.journal, told, self._keep)
            if gone:
                self.client.remove_many([self._names.entry(EntryKind.ANCHOR, key) for key in gone])
            self.counts["joined"] += 1
            done(True)

        self._later("join", run, lambda: done(False))

    def touch(self, pool: bytes, anchors: Sequence[bytes]) -> None:
        name, now = self._names.entry(EntryKind.POOL, pool), self._clock()
        self._later("touch", lambda: self.client.set_touch(name, dict.fromkeys(anchors, now)))

    def members(self, pool: bytes) -> list[bytes] | None:
        try:
            found = self.client.set_members(self._names.entry(EntryKind.POOL, pool))
        except RedisUnavailable:
            return None
        return [member for member, _ in sorted(found, key=lambda m: (m[1], m[0]))]

    def flush(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting == 0, timeout)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._queue.put(None)
        if self._trimmer is not None:
            self._trimmer.close()
        self.client.close()
        self._writer.join(1.0)

    def _later(self, what: str, run: Callable[[], object], failed: Callable[[], None] = lambda: None) -> None:
        with self._changed:
            closed = self._closed
            if not closed:
                self._waiting += 1
                self._queue.put(_Step(what, run, failed))
        if closed:
            failed()

    def _write(self) -> None:
        held: _Put | _Step | None = None
        while (item := held or self._queue.get()) is not None:
            held = None
            if isinstance(item, _Step):
                if not self._attempt(item.what, item.run):
                    item.failed()
                self._finished(1, 0)
                continue
            batch, size = [item], item.blob.nbytes
            while size < _BATCH_BYTES and not self._queue.empty():
                following = self._queue.get()
                if not isinstance(following, _Put):
                    held = following
                    break
                batch.append(following)
                size += following.blob.nbytes
            self._put_batch(batch)
            self._finished(len(batch), size)
            if held is None and self._closed:
                break
        self._discard()

    def _put_batch(self, batch: Sequence[_Put]) -> None:
        def run() -> None:
            there = self.client.exists_many([put.name for put in batch])
            new = [put for put, known in zip(batch, there, strict=True) if not known]
            if new:
                self.client.put_many([(put.name, put.blob) for put in new])
            self.counts["written"] += len(new)
            self.counts["there"] += len(batch) - len(new)

        if self._closed or not self._attempt("put", run):
            self.counts["dropped"] += len(batch)
        for put in batch:
            put.release()

    def _attempt(self, what: str, run: Callable[[], object]) -> bool:
        if self._closed:
            return False
        try:
            run()
            return True
        except RedisUnavailable as error:
            self.counts[f"failed_{what}"] += 1
            if self.counts[f"failed_{what}"] == 1:
                logger.warning("kvcmas: Redis: %s; entries stay on this node until it is back", error)
        except Exception:
            self.counts[f"failed_{what}"] += 1
            logger.exception("kvcmas: Redis: %s failed", what)
        return False

    def _discard(self) -> None:
        """Let go of what still waits."""
        while not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, _Put):
                self.counts["dropped"] += 1
                item.release()
                self._finished(1, item.blob.nbytes)
            elif item is not None:
                item.failed()
                self._finished(1, 0)

    def _finished(self, items: int, size: int) -> None:
        with self._changed:
            self._waiting -= items
            self._waiting_bytes -= size
            if self._waiting == 0:
                self._changed.notify_all()
