"""What a store of entries promises. Implementations: ``connectors/lmcache_store.py``.

A store belongs to one process and one tensor-parallel rank; it may be used from several threads. Nothing in it waits
for room, and nothing that a tier does wrong gets out as an exception: the worst answer is None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import NamedTuple, Protocol

from torch import Tensor

from lmcache_kvcmas.entries import EntryKind, Meta, TensorSpec
from lmcache_kvcmas.manifest import Needed
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.shared import SharedTier


class MissCause(Enum):
    ABSENT = "absent"
    """No tier holds it (never stored, evicted, or lost)."""
    DAMAGED = "damaged"
    """Truncated, corrupted, or of an unknown format; removed."""
    FOREIGN = "foreign"
    """Whole, but of another model, rank, kind or key; removed."""
    FAILED = "failed"
    """A tier raised an error, or had no room to bring the entry into memory."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counted since the store was opened, but for the first block, which is as of now. Sizes in bytes."""

    entries: int = 0
    """In memory."""
    bytes_used: int = 0
    """Memory taken, padding and entries being written or read included."""
    bytes_budget: int = 0
    disk_entries: int = 0
    disk_bytes: int = 0
    disk_budget: int = 0
    leased: int = 0
    """Leases and reservations that are open."""

    hits: int = 0
    misses: Mapping[MissCause, int] = field(default_factory=dict)
    stored: int = 0
    refused: int = 0
    """Entries that were not stored, for want of room but for failures of a tier."""
    evictions: int = 0
    """Entries that left memory to make room."""
    disk_failures: int = 0
    """Entries that could not be written to disk; they stay in memory as long as there is room."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """The shared tier's own counts; empty without one."""


class Reservation(Protocol):
    """Room for one entry. Write into ``tensors``, then commit or abandon: once, and nothing is touched after that."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Writable views on the CPU, of the shapes and dtypes asked for; what they hold is undefined."""

    def commit(self) -> bool:
        """Makes the entry readable, all at once. True if the store now holds the key.

        If it held it already, the first entry stays (equal keys mean equal content), except for a POOL: the last wins,
        and it is kept in memory only.
        """

    def abandon(self) -> None:
        """Gives the room back. Does nothing after a commit."""


class Lease(Protocol):
    """One entry, held in memory until it is released; eviction passes it by. Release it, or use it in a ``with``.

    ``tensors`` are views of the store's own memory: read-only by agreement, and dead after the release.
    A lease that is dropped without a release keeps its memory for good, rather than have views change their content.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def meta(self) -> Meta: ...

    def release(self) -> None:
        """Idempotent."""

    def __enter__(self) -> "Lease": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NotHad(NamedTuple):
    """What a prefetch did not bring."""

    gone: tuple[Needed, ...] = ()
    """No tier holds it."""
    unreachable: tuple[Needed, ...] = ()
    """The shared tier did not answer, or there was no memory; later it may be had."""


class EntryStore(Protocol):
    """Keys are 32 bytes, made by ``keys.KeySpace``."""

    def reserve(self, key: bytes, kind: EntryKind, tensors: Mapping[str, TensorSpec], meta: Meta) -> Reservation | None:
        """Room for an entry, made by evicting others if need be. None if there is none: never waits.

        Raises:
            EntryError: no entry can look like this (unknown dtype, header beyond 64 KiB).
        """

    @property
    def shared(self) -> SharedTier | None:
        """What other nodes have a part in, if there is such a tier. All other calls but two are about this node's own
        tiers: `prefetch` reads from it, and commits also go there."""

    def get(self, key: bytes, kind: EntryKind) -> Lease | None:
        """The entry, its checksums verified, brought into memory from disk if need be. None is a miss."""

    def prefetch(self, wanted: Sequence[Needed]) -> "NotHad":
        """Bring entries from the shared tier into memory, in order and in batches; returns those that no tier gave.

        Ends with the first batch that gets no answer, so a dead tier costs one of its time-outs, and a slow one its
        time-out for each batch: not for the critical path.
        """

    def share(self, entry: Needed) -> bool:
        """Queue an entry that memory holds for the shared tier once more; False if there is nothing to queue."""

    def publish(self, record: Record) -> None:
        """Tell other nodes of ``record``, once everything committed so far has reached the shared tier."""

    def contains(self, key: bytes) -> bool:
        """Whether memory or disk holds the key. Says nothing about its being whole."""

    def remove(self, key: bytes) -> None:
        """Removes it from memory and disk. Open leases on it stay valid."""

    def take_evicted(self) -> list[bytes]:
        """Keys that left memory and disk since the last call, in order. Cheap when there are none."""

    def stats(self) -> StoreStats: ...

    def flush(self, timeout: float) -> bool:
        """Waits until what was committed has reached the lower tiers, ``timeout`` seconds at most. True if it has."""

    def close(self) -> None:
        """Ends within 5 seconds. Afterwards everything is a miss; open leases stay valid."""


def put(store: EntryStore, key: bytes, kind: EntryKind, tensors: Mapping[str, Tensor], meta: Meta) -> bool:
    """Store finished tensors as an entry. True if the store now holds the key; False if there was no room."""
    room = store.reserve(key, kind, {name: TensorSpec.of(t) for name, t in tensors.items()}, meta)
    if room is None:
        return False
    for name, tensor in tensors.items():
        room.tensors[name].copy_(tensor)
    return room.commit()
