"""What is ours in Redis, name by name: nothing is read but names, sizes, lives, and the small keys about pools."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_names import EntryName
from lmcache_kvcmas.connectors.redis_tier import Announcement
from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.keys import GROUP, TENANT

T = TypeVar("T")

BATCH = 500
_ANNOUNCEMENT = msgspec.msgpack.Decoder(Announcement)


class Warm(msgspec.Struct, frozen=True, array_like=True):
    """A field of the hash ``PREFIX:MODEL:warm``: what one context left, once it was all there."""

    tenant: str
    """As key names spell it."""
    records: list[bytes]
    created: float


_WARM = msgspec.msgpack.Decoder(Warm)


@dataclass(frozen=True, slots=True)
class Item:
    """An entry."""

    name: bytes
    of: EntryName
    size: int
    ttl: int | None
    """Seconds left; None: for ever."""


@dataclass(frozen=True, slots=True)
class Pool:
    name: bytes
    of: EntryName
    members: tuple[tuple[bytes, float], ...]
    """Anchors' keys, and when each was last of use (seconds since 1970)."""
    ttl: int | None


@dataclass(frozen=True, slots=True)
class EdgeLine:
    """A field of the hash ``PREFIX:MODEL:edges``."""

    model: str
    pool: bytes
    edge: Announcement


@dataclass(frozen=True, slots=True)
class Catalogue:
    """As of some moment: other nodes go on writing."""

    prefix: str
    entries: tuple[Item, ...] = ()
    """All kinds but pools."""
    pools: tuple[Pool, ...] = ()
    edges: tuple[EdgeLine, ...] = ()
    warm: tuple[tuple[str, bytes, Warm], ...] = ()
    """Model, field, and what it says."""
    others: tuple[tuple[str, bytes], ...] = ()
    """Model and name of journals and of the hashes that ``edges`` and ``warm`` were read from."""

    @property
    def keys(self) -> int:
        return len(self.entries) + len(self.pools) + len(self.others)

    @property
    def total_bytes(self) -> int:
        """Of entries' values; what Redis needs on top is its own affair."""
        return sum(item.size for item in self.entries)

    @property
    def models(self) -> list[str]:
        named = {item.of.model for item in self.entries} | {pool.of.model for pool in self.pools}
        return sorted(named | {model for model, _ in self.others})


def read_catalogue(client: RedisClient, prefix: str) -> Catalogue:
    """All keys under ``prefix`` that have a name of ours. Keys of other prefixes that begin alike are left out.

    Raises:
        RedisUnavailable: any part of it could not be read.
    """
    entries: list[tuple[bytes, EntryName]] = []
    pools: list[tuple[bytes, EntryName]] = []
    others: list[tuple[str, bytes]] = []
    tail = re.compile(re.escape(prefix.encode()) + rb":([0-9a-f]{16}):(journal:[0-9a-f]{16}|edges|warm)")
    for name in sorted(set(client.scan(f"{prefix}:*"))):
        of = EntryName.parse(name)
        if of is not None and name.startswith(f"{prefix}:{of.model}:".encode()):
            (pools if of.kind is EntryKind.POOL else entries).append((name, of))
        elif match := tail.fullmatch(name):
            others.append((match[1].decode(), name))
    return Catalogue(
        prefix,
        tuple(_items(client, entries)),
        tuple(_pools(client, pools)),
        tuple(_edges(client, others)),
        tuple(_warm(client, others)),
        tuple(others),
    )


def _items(client: RedisClient, named: Sequence[tuple[bytes, EntryName]]) -> Iterator[Item]:
    for batch in batches(named, BATCH):
        names = [name for name, _ in batch]
        found = zip(batch, client.sizes(names), client.ttl_many(names), strict=True)
        for (name, of), size, ttl in found:
            if ttl is not None:  # else it went in between
                yield Item(name, of, size or 0, None if ttl < 0 else ttl)


def _pools(client: RedisClient, named: Sequence[tuple[bytes, EntryName]]) -> Iterator[Pool]:
    lives = [ttl for batch in batches(named, BATCH) for ttl in client.ttl_many([name for name, _ in batch])]
    for (name, of), ttl in zip(named, lives, strict=True):
        if ttl is not None:
            yield Pool(name, of, tuple(client.set_members(name)), None if ttl < 0 else ttl)


def _edges(client: RedisClient, others: Sequence[tuple[str, bytes]]) -> Iterator[EdgeLine]:
    for model, name in others:
        if name.endswith(b":edges"):
            for pool, line in sorted(client.hash_all(name).items()):
                edge = _decoded(_ANNOUNCEMENT, line)
                if edge is not None:
                    yield EdgeLine(model, pool, edge)


def _warm(client: RedisClient, others: Sequence[tuple[str, bytes]]) -> Iterator[tuple[str, bytes, Warm]]:
    for model, name in others:
        if name.endswith(b":warm"):
            for field, value in sorted(client.hash_all(name).items()):
                mark = _decoded(_WARM, value)
                if mark is not None:
                    yield model, field, mark


def _decoded(decoder: msgspec.msgpack.Decoder[T], blob: bytes) -> T | None:
    try:
        return decoder.decode(blob)
    except msgspec.MsgspecError:
        return None


def warm_name(prefix: str, model: str) -> str:
    """The hash of contexts that were warmed; ``model`` as key names spell it."""
    return f"{prefix}:{model}:warm"


def edges_name(prefix: str, model: str) -> str:
    return f"{prefix}:{model}:edges"


def entry_name(prefix: str, model: str, kind: EntryKind, rank: int, size: int, key: bytes) -> bytes:
    """As ``Names.entry``, of a model that is known by its mark only."""
    tenant, group, rest = key[TENANT].hex(), key[GROUP].hex(), key[GROUP.stop :].hex()
    return f"{prefix}:{model}:{kind.value}:{rank}-{size}:{tenant}:{{{group}}}{rest}".encode()


def anchor_name(prefix: str, pool: EntryName, key: bytes) -> bytes:
    """Of a pool's member."""
    return entry_name(prefix, pool.model, EntryKind.ANCHOR, pool.rank, pool.size, key)


def batches(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]


def sized_batches(items: Iterable[Item], most: int, most_bytes: int) -> Iterator[list[Item]]:
    """At most ``most`` entries and ``most_bytes`` bytes each, or one entry that is larger."""
    batch: list[Item] = []
    total = 0
    for item in items:
        if batch and (len(batch) >= most or total + item.size > most_bytes):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += item.size
    if batch:
        yield batch


def remove_names(client: RedisClient, names: Sequence[bytes], tick: Callable[[int], object] = lambda n: None) -> int:
    """Removes keys in batches; how many there were. ``tick`` hears of each batch's length."""
    removed = 0
    for batch in batches(names, BATCH):
        removed += client.remove_many(batch)
        tick(len(batch))
    return removed
