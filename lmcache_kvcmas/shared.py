"""What nodes have in common, as the rest of the code sees it. Implementation: ``connectors/redis_tier.py``.

Two rules make it safe to share. A manifest (a record, a place in a pool) is written after what it points at, and by the
one queue that wrote that, so a reader never finds a name without its entry, except by eviction. And a pool is a set of
(anchor, last useful time) of which the ``keep`` latest stay: adding takes the later of two times, so additions commute,
repeat harmlessly, and nodes that learn at once end with the same set.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_kvcmas.manifest import Needed
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.spans import Edge


@dataclass(frozen=True, slots=True)
class PoolNews:
    """Some node's pool of ``edge`` changed; it has ``anchors`` now."""

    tenant: str
    edge: Edge
    anchors: int


@dataclass(frozen=True, slots=True)
class RecordNews:
    """Some node left ``record``, and all ranks' entries of it are there."""

    record: Record


News = PoolNews | RecordNews


class SharedTier(Protocol):
    """Writes are queued and done in order behind the caller's back; reads take one time-out at most.

    Nothing raises: what cannot be written is dropped and counted, what cannot be read is a miss.
    """

    @property
    def counts(self) -> Mapping[str, int]:
        """What became of the queued writes, by name."""

    def put(self, needed: Needed, blob: memoryview, release: Callable[[], None]) -> None:
        """Queue an entry; ``release`` is called once its bytes are not needed any more, in any case."""

    def read(
        self, wanted: Sequence[Needed], allocate: Callable[[int, int], memoryview | None]
    ) -> list[bool | None] | None:
        """Read entries in one batch into the memory that ``allocate(index, size)`` gives; which of them were read.

        None if the tier did not answer in time, for all of them or for one: it may hold what it did not come to.
        """

    def remove(self, needed: Needed) -> None:
        """Queue the removal of an entry that turned out to be damaged."""

    def publish(self, record: Record, blob: memoryview) -> None:
        """Queue the manifest of ``record``; dropped if an entry that it needs is not there by then."""

    def join(self, news: PoolNews, pool: bytes, anchor: bytes, keep: int, done: Callable[[bool], None]) -> None:
        """Queue the addition of ``anchor``, stored before, to ``pool``; ``done`` hears whether that came about."""

    def touch(self, pool: bytes, anchors: Sequence[bytes]) -> None:
        """Queue the word that ``anchors`` of ``pool`` were of use now."""

    def members(self, pool: bytes) -> list[bytes] | None:
        """Anchors of ``pool``, the longest unused first; None if they cannot be had now."""

    def flush(self, timeout: float) -> bool:
        """Wait until what was queued is written (or dropped), ``timeout`` seconds at most."""

    def close(self) -> None:
        """Ends within a second. What still waits is dropped."""
