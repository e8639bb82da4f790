"""Keeps our keys in Redis below ``max_bytes``, for servers that others use as well.

Every use of a key renews its time to live, so what has the least left is what was not used for the longest. Own deltas
go first, then bases; records, pools and anchors are small, and stay. Nodes need not agree on who does this: all of them
would choose the same keys, and removing one twice does no harm.
"""

import logging
import random
import threading
from collections import Counter

from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_errors import RedisUnavailable
from lmcache_kvcmas.connectors.redis_names import EntryName
from lmcache_kvcmas.entries import EntryKind

logger = logging.getLogger(__name__)

_EVERY = 30.0  # seconds, on the mean
_ROOM = 0.9  # of the budget is left in use, or the next write would be over it again
_BATCH = 1000
_FIRST = (EntryKind.DELTA, EntryKind.BASE)


def trim(client: RedisClient, prefix: str, most: int) -> int:
    """Remove what was not used for the longest until ``prefix``'s entries take less than ``most`` bytes.

    Returns how many went. Raises RedisUnavailable.
    """
    total = 0
    found: dict[EntryKind, list[tuple[int, bytes, int]]] = {kind: [] for kind in _FIRST}
    for names in _batches(client, prefix):
        lives = client.ttl_many(names)
        for name, size, life in zip(names, client.sizes(names), lives, strict=True):
            parsed = EntryName.parse(name)
            total += size or 0
            if parsed is not None and parsed.kind in found and size and life is not None:
                found[parsed.kind].append((life, name, size))
    if total <= most:
        return 0
    goal, victims = most * _ROOM, []
    for _, name, size in (victim for kind in _FIRST for victim in sorted(found[kind])):
        if total <= goal:
            break
        victims.append(name)
        total -= size
    for begin in range(0, len(victims), _BATCH):
        client.remove_many(victims[begin : begin + _BATCH])
    return len(victims)


def _batches(client: RedisClient, prefix: str) -> list[list[bytes]]:
    """Names of all entries; pools are none of them: they are no strings."""
    parsed = ((name, EntryName.parse(name)) for name in client.scan(f"{prefix}:*"))
    names = [name for name, entry in parsed if entry is not None and entry.kind is not EntryKind.POOL]
    return [names[begin : begin + _BATCH] for begin in range(0, len(names), _BATCH)]


class Trimmer:
    """Trims now and then, on a thread of its own."""

    def __init__(self, client: RedisClient, prefix: str, most: int, counts: Counter[str]) -> None:
        self._client, self._prefix, self._most, self._counts = client, prefix, most, counts
        self._stop = threading.Event()
        threading.Thread(target=self._work, name="kvcmas-redis-trim", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def _work(self) -> None:
        while not self._stop.wait(random.uniform(0.5, 1.5) * _EVERY):
            try:
                self._counts["trimmed"] += trim(self._client, self._prefix, self._most)
            except RedisUnavailable:
                self._counts["untrimmed"] += 1
            except Exception:
                logger.exception("kvcmas: Redis could not be kept below max_bytes")
