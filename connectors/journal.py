"""The journal's reading half: what other nodes left, brought to this one before a request asks for it.

Each node follows one stream and keeps an index of its own, so that matching a prompt never waits for a network.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from lmcache_kvcmas.connectors.redis_client import RedisClient, RedisUnavailable
from lmcache_kvcmas.connectors.redis_names import Names
from lmcache_kvcmas.connectors.redis_tier import Announcement
from lmcache_kvcmas.entries import EntryKind, Owner, decode
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.keys import KEY_BYTES
from lmcache_kvcmas.manifest import from_tensors
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.shared import News, PoolNews, RecordNews
from lmcache_kvcmas.spans import Edge

logger = logging.getLogger(__name__)

_BATCH = 64
_BLOCK_MS = 1000
_PAUSE = 0.25  # seconds between attempts; the client's breaker makes most of them cheap
_GIVE_UP = 3.0
_HALF_TOLD = 4096
"""Records of which some ranks have not spoken yet."""

_ANNOUNCEMENT = msgspec.msgpack.Decoder(Announcement)


class Journal:
    """Follows what other nodes write.

    Args:
        node: Own records are left out.
        keep: Lines of the past that are read at the start.
        records: False for workers, which only follow pools.
        told: Called from the journal's thread with each piece of news; without it, ``take`` gives them.
    """

    def __init__(
        self,
        client: RedisClient,
        names: Names,
        node: str,
        keep: int,
        *,
        records: bool = True,
        told: Callable[[News], None] | None = None,
    ) -> None:
        self._client, self._names, self._node = client, names, node
        self._keep, self._records = keep, records
        self._rank, self._size = names.owner.tp_rank, names.owner.tp_size
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._told = told or self._news.put
        self._ranks: OrderedDict[bytes, set[int]] = OrderedDict()
        self._last: str | None = None
        self._stop = threading.Event()
        self.caught_up = threading.Event()
        """Set once what was there at the start has been read, or Redis has not answered for `_GIVE_UP` seconds."""
        self._thread = threading.Thread(target=self._follow, name="kvcmas-journal", daemon=True)
        self._thread.start()

    def take(self, most: int) -> list[News]:
        """At most ``most`` news, oldest first."""
        found: list[News] = []
        while len(found) < most and not self._news.empty():
            found.append(self._news.get())
        return found

    def close(self) -> None:
        self._stop.set()
        self._client.close()
        self._thread.join(1.0)

    def _follow(self) -> None:
        begun = time.monotonic()
        while not self._stop.is_set():
            try:
                if self._last is None:
                    self._read_past()
                self.caught_up.set()
                lines = self._client.tail(self._names.journal, self._last, _BATCH, _BLOCK_MS)
                self._take_in(lines)
            except RedisUnavailable:
                if time.monotonic() > begun + _GIVE_UP:
                    self.caught_up.set()
                self._stop.wait(_PAUSE)
            except Exception:
                logger.exception("kvcmas: the journal of other nodes could not be read")
                self._stop.wait(_PAUSE)

    def _read_past(self) -> None:
        past = self._client.latest(self._names.journal, self._keep)
        for begin in range(len(past), 0, -_BATCH):
            self._take_in(past[max(0, begin - _BATCH) : begin][::-1])
        if self._last is None:
            self._last = "0-0"

    def _take_in(self, lines: Sequence[tuple[str, Mapping[bytes, bytes]]]) -> None:
        keys: dict[bytes, None] = {}
        pools: dict[tuple[str, Edge], PoolNews] = {}
        for position, line in lines:
            if b"pool" in line:
                news = self._pool(line)  # our own as well: others may have been faster
                if news is not None:
                    pools[news.tenant, news.edge] = news
            elif self._records and line.get(b"node") != self._node.encode():
                key = self._complete(line)
                if key is not None:
                    keys[key] = None
            self._last = position
        for news in pools.values():
            self._told(news)
        if keys:
            self._fetch(list(keys))

    def _pool(self, line: Mapping[bytes, bytes]) -> PoolNews | None:
        if line.get(b"rank") != str(self._rank).encode():
            return None
        try:
            told = _ANNOUNCEMENT.decode(line[b"pool"])
        except msgspec.MsgspecError:
            return None
        return PoolNews(told.tenant, Edge(told.source, told.destination, told.slot), told.anchors)

    def _complete(self, line: Mapping[bytes, bytes]) -> bytes | None:
        """The key of a record of which all ranks have written their part; a node of another size is of no use."""
        key, rank = line.get(b"record", b""), line.get(b"rank", b"")
        if len(key) != KEY_BYTES or line.get(b"of") != str(self._size).encode() or not rank.isdigit():
            return None
        ranks = self._ranks.setdefault(key, set())
        ranks.add(int(rank))
        if len(ranks) < self._size:
            while len(self._ranks) > _HALF_TOLD:
                self._ranks.popitem(last=False)
            return None
        del self._ranks[key]
        return key

    def _fetch(self, keys: Sequence[bytes]) -> None:
        blobs = self._client.get_many([self._names.entry(EntryKind.RECORD, key) for key in keys])
        for key, blob in zip(keys, blobs, strict=True):
            record = None if blob is None else self._decode(key, blob)
            if record is not None:
                self._told(RecordNews(record))

    def _decode(self, key: bytes, blob: bytes | memoryview) -> Record | None:
        try:
            buffer = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
            owner = Owner(self._names.owner.model)
            entry = decode(buffer, kind=EntryKind.RECORD, owner=owner, key=key)
            return from_tensors(key, entry.tensors, entry.header.meta)
        except (EntryError, ValueError) as error:
            logger.warning("kvcmas: a record of another node is damaged: %s", error)
            return None
