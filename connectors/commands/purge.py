"""`kvcmas purge`: remove an edge, a tenant, a model, what is old, or everything of ours."""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress

from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors.commands.catalogue import (
    BATCH,
    Catalogue,
    Item,
    Pool,
    anchor_name,
    batches,
    edges_name,
    read_catalogue,
    remove_names,
    warm_name,
)
from lmcache_kvcmas.connectors.commands.opened import open_redis
from lmcache_kvcmas.connectors.commands.shown import plain_table, size
from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.entries import HEAD_BYTES, EntryKind, Header, read_header
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.tenants import tenant_mark, tenant_name

_ORDER = (EntryKind.RECORD, EntryKind.POOL, EntryKind.ANCHOR, EntryKind.DELTA, EntryKind.BASE)
"""What points at others goes first: a reader never finds a name without its entry."""


@dataclass(frozen=True, slots=True)
class Filters:
    """All that are given must fit."""

    edge: tuple[str, str] | None = None
    """Source and destination; all slots."""
    tenant: str | None = None
    """As key names spell it."""
    salt: str | None = None
    """The requests' ``cache_salt``; with the server's salt it names the tenant."""
    model: str | None = None
    """As key names spell it."""
    older_than: float | None = None
    """Seconds since an entry was written, by its writer's clock."""
    kinds: tuple[EntryKind, ...] = ()

    @property
    def whole_models(self) -> bool:
        """Whether nothing of a model that fits is to stay."""
        return (
            self.edge is None
            and self.tenant is None
            and self.salt is None
            and self.older_than is None
            and not self.kinds
        )


@dataclass(frozen=True, slots=True)
class Removal:
    """What a purge takes away, in the order in which it does."""

    entries: tuple[Item, ...] = ()
    pools: tuple[Pool, ...] = ()
    members: tuple[tuple[bytes, tuple[bytes, ...]], ...] = ()
    """Of pools that stay."""
    fields: tuple[tuple[str, tuple[bytes, ...]], ...] = ()
    """Of the hashes of edges and of warmed contexts."""
    whole: tuple[bytes, ...] = ()
    """Journals and hashes."""
    unreadable: int = 0
    """Entries whose header cannot be read, so that no filter can tell; they stay."""

    @property
    def keys(self) -> int:
        return len(self.entries) + len(self.pools) + len(self.whole)


def run_purge(file: Path | None, filters: Filters, yes: bool, dry_run: bool) -> bool:
    """False if the person said no. Raises ConfigError or RedisUnavailable."""
    console = Console()
    with open_redis(file) as opened:
        client = opened.client
        catalogue = read_catalogue(client, opened.settings.prefix)
        removal = select(client, catalogue, filters, opened.config.settings, time.time())
        if not removal.keys and not removal.members:
            console.print("nothing to remove")
            return True
        show(removal, console)
        if dry_run:
            console.print("nothing was removed (--dry-run)")
            return True
        if not yes and not typer.confirm(f"Remove {removal.keys} keys?"):
            console.print("nothing was removed")
            return False
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("removing", total=removal.keys)
            removed = remove(client, removal, lambda n: bar.update(task, advance=n))
        console.print(f"removed {removed} keys")
    return True


def select(client: RedisClient, catalogue: Catalogue, filters: Filters, settings: Settings, now: float) -> Removal:
    """What of ``catalogue`` fits ``filters``. Reads headers only if edge, age or salt are asked for."""
    tenants = _tenants(client, catalogue, filters, settings)
    entries = [item for item in catalogue.entries if _fits(item, filters, tenants)]
    pools = [pool for pool in catalogue.pools if _fits(pool, filters, tenants)]
    unreadable = 0
    if filters.edge is not None:
        edge_pools = _pools_of(catalogue, filters.edge)
        keys = {(p.of.model, p.of.rank, p.of.size, m) for p in edge_pools for m, _ in p.members}
        headers, unreadable = _headers(client, [i for i in entries if i.of.kind in (EntryKind.ANCHOR, EntryKind.DELTA)])
        named = {
            name
            for name, header in headers.items()
            if (header.meta.get("source"), header.meta.get("destination")) == filters.edge
        }
        entries = [
            item
            for item in entries
            if item.name in named
            or (item.of.kind is EntryKind.ANCHOR and (item.of.model, item.of.rank, item.of.size, item.of.key) in keys)
        ]
        anchors = {item.name for item in entries if item.of.kind is EntryKind.ANCHOR}
        known = {pool.name for pool in edge_pools}
        pools = [p for p in pools if p.name in known or _members_in(catalogue, p, anchors)]
    if filters.older_than is not None:
        headers, unreadable = _headers(client, entries)
        limit = now - filters.older_than
        entries = [item for item in entries if item.name in headers and headers[item.name].created < limit]
        pools = []  # they lose members, and go with the last one
    if filters.kinds:
        entries = [item for item in entries if item.of.kind in filters.kinds]
        pools = [pool for pool in pools if EntryKind.POOL in filters.kinds]
    return _removal(catalogue, entries, pools, filters, unreadable)


def _removal(
    catalogue: Catalogue, entries: Sequence[Item], pools: Sequence[Pool], filters: Filters, unreadable: int
) -> Removal:
    prefix = catalogue.prefix
    anchors = {item.name for item in entries if item.of.kind is EntryKind.ANCHOR}
    going = {pool.name for pool in pools}
    members = {}
    for pool in catalogue.pools:
        lost = _members_in(catalogue, pool, anchors) if pool.name not in going else ()
        if lost:
            members[pool.name] = lost
            if len(lost) == len(pool.members):
                going.add(pool.name)
    fields: dict[str, list[bytes]] = defaultdict(list)
    for line in catalogue.edges:
        if line.pool in going:
            fields[edges_name(prefix, line.model)].append(line.pool)
    touched = {(of.model, of.tenant) for of in (*(i.of for i in entries), *(p.of for p in pools))}
    for model, field, mark in catalogue.warm:
        if (model, mark.tenant) in touched:
            fields[warm_name(prefix, model)].append(field)
    whole: tuple[bytes, ...] = ()
    if filters.whole_models:
        whole = tuple(name for model, name in catalogue.others if filters.model in (None, model))
        fields = defaultdict(list)
    order = {kind: place for place, kind in enumerate(_ORDER)}
    return Removal(
        tuple(sorted(entries, key=lambda item: order[item.of.kind])),
        tuple(pools),
        tuple(members.items()),
        tuple((name, tuple(some)) for name, some in fields.items()),
        whole,
        unreadable,
    )


def _fits(x: Item | Pool, filters: Filters, tenants: dict[str, str] | None) -> bool:
    return (
        filters.model in (None, x.of.model)
        and filters.tenant in (None, x.of.tenant)
        and (tenants is None or tenants.get(x.of.model) == x.of.tenant)
    )


def _pools_of(catalogue: Catalogue, edge: tuple[str, str]) -> list[Pool]:
    """Pools of an edge, as the hash of edges knows them."""
    names = {line.pool for line in catalogue.edges if (line.edge.source, line.edge.destination) == edge}
    return [pool for pool in catalogue.pools if pool.name in names]


def _members_in(catalogue: Catalogue, pool: Pool, anchors: set[bytes]) -> tuple[bytes, ...]:
    return tuple(m for m, _ in pool.members if anchor_name(catalogue.prefix, pool.of, m) in anchors)


def _headers(client: RedisClient, items: Iterable[Item]) -> tuple[dict[bytes, Header], int]:
    """Headers by name, and how many could not be read."""
    found: dict[bytes, Header] = {}
    unreadable = 0
    for batch in batches(list(items), BATCH):
        for item, head in zip(batch, client.head_many([i.name for i in batch], HEAD_BYTES), strict=True):
            try:
                found[item.name] = read_header(head)
            except EntryError:
                unreadable += bool(head)
    return found, unreadable


def _tenants(client: RedisClient, catalogue: Catalogue, filters: Filters, settings: Settings) -> dict[str, str] | None:
    """By model, the mark of the tenant that ``--salt`` names. Marks hang on the whole fingerprint: a header has it."""
    if filters.salt is None:
        return None
    firsts = {item.of.model: item for item in catalogue.entries}
    headers, _ = _headers(client, firsts.values())
    tenant = tenant_name(settings.salt, filters.salt)
    return {m: tenant_mark(headers[i.name].model, tenant) for m, i in firsts.items() if i.name in headers}


def remove(client: RedisClient, removal: Removal, tick: Callable[[int], object] = lambda n: None) -> int:
    """Removes it; how many keys there were. Raises RedisUnavailable, with a part done."""
    by_kind: dict[EntryKind, list[bytes]] = defaultdict(list)
    for item in removal.entries:
        by_kind[item.of.kind].append(item.name)
    by_kind[EntryKind.POOL] = [pool.name for pool in removal.pools]
    removed = remove_names(client, removal.whole, tick)
    for name, fields in removal.fields:
        client.hash_remove(name, fields)
    for pool, members in removal.members:
        client.set_remove(pool, members)
    for kind in _ORDER:
        removed += remove_names(client, by_kind[kind], tick)
    return removed


def show(removal: Removal, console: Console) -> None:
    """What would go."""
    table = plain_table("to remove", "kind", "entries", "bytes")
    counts = Counter(item.of.kind for item in removal.entries)
    for kind in _ORDER:
        if kind is EntryKind.POOL and removal.pools:
            table.add_row(kind.value, str(len(removal.pools)), "")
        elif counts[kind]:
            total = sum(item.size for item in removal.entries if item.of.kind is kind)
            table.add_row(kind.value, str(counts[kind]), size(total))
    console.print(table)
    members = sum(len(some) for _, some in removal.members)
    if members:
        console.print(f"and {members} places in pools that keep other anchors, or go with their last one")
    if removal.whole:
        console.print(f"and {len(removal.whole)} journals and hashes")
    if removal.unreadable:
        console.print(f"{removal.unreadable} entries have no readable header and stay: see `kvcmas verify`")
