"""`kvcmas inspect`: what Redis holds under the prefix."""

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
from rich.console import Console

from lmcache_kvcmas.connectors.commands.catalogue import Catalogue, read_catalogue
from lmcache_kvcmas.connectors.commands.opened import open_redis
from lmcache_kvcmas.connectors.commands.shown import age, plain_table, size
from lmcache_kvcmas.connectors.redis_settings import RedisSettings
from lmcache_kvcmas.entries import EntryKind

_KINDS = (EntryKind.RECORD, EntryKind.BASE, EntryKind.DELTA, EntryKind.ANCHOR, EntryKind.POOL)


class Spread(msgspec.Struct, frozen=True):
    """Seconds."""

    min: float
    median: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        return cls(min(values), median(values)) if values else None


class Kind(msgspec.Struct, frozen=True):
    entries: int
    bytes: int
    """Of a pool, which is no string: 0."""


class TenantPart(msgspec.Struct, frozen=True):
    tenant: str
    kinds: dict[str, Kind]
    bytes: int


class EdgePart(msgspec.Struct, frozen=True):
    """One rank's pool of an edge."""

    tenant: str
    source: str
    destination: str
    slot: int
    rank: int
    ranks: int
    anchors: int
    capacity: int
    newest_seconds: float | None
    """Since the latest use of any of its anchors."""
    oldest_seconds: float | None
    """Since the latest use of the one that was not used for longest."""


class ModelPart(msgspec.Struct, frozen=True):
    model: str
    tenants: list[TenantPart]
    edges: list[EdgePart]
    warmed_contexts: int


class ServerPart(msgspec.Struct, frozen=True):
    """As the server's INFO says: of all its keys, whoever they belong to."""

    version: str
    nodes: int
    keys: int
    used_memory: int
    maxmemory: int
    maxmemory_policy: str
    keyspace_hits: int
    keyspace_misses: int
    evicted_keys: int
    expired_keys: int


class Inspection(msgspec.Struct, frozen=True):
    """What ``--json`` writes."""

    url: str
    prefix: str
    keys: int
    """Under the prefix, and named as ours are."""
    entries: int
    bytes: int
    """Of entries' values."""
    ttl_seconds: Spread | None
    """Left until an entry goes; None where none ever does."""
    idle_seconds: Spread | None
    """Since an entry was last read or written, by the file's ``ttl_seconds``; None where that is 0."""
    unused_entries: int
    """Of them: not used for a day."""
    models: list[ModelPart]
    server: ServerPart


class _PoolEdge(NamedTuple):
    source: str
    destination: str
    slot: int


_UNNAMED = _PoolEdge("?", "?", -1)


def run_inspect(file: Path | None, as_json: bool) -> None:
    """Raises ConfigError or RedisUnavailable."""
    with open_redis(file) as opened:
        catalogue = read_catalogue(opened.client, opened.settings.prefix)
        found = examine(
            catalogue, opened.settings, opened.config.settings.max_anchors, opened.client.info(), time.time()
        )
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n")
    else:
        show(found, Console())


def examine(
    catalogue: Catalogue, settings: RedisSettings, capacity: int, info: dict[str, int | str], now: float
) -> Inspection:
    """Sums over ``catalogue``."""
    lives = [float(item.ttl) for item in catalogue.entries if item.ttl is not None]
    idle = [max(0.0, settings.ttl_seconds - ttl) for ttl in lives] if settings.ttl_seconds else []
    return Inspection(
        url=settings.url,
        prefix=catalogue.prefix,
        keys=catalogue.keys,
        entries=len(catalogue.entries),
        bytes=catalogue.total_bytes,
        ttl_seconds=Spread.of(lives),
        idle_seconds=Spread.of(idle),
        unused_entries=sum(seconds > 86_400 for seconds in idle),
        models=[_model(catalogue, model, capacity, now) for model in catalogue.models],
        server=ServerPart(
            version=str(info.get("redis_version", "?")),
            maxmemory_policy=str(info.get("maxmemory_policy", "?")),
            **{name: _number(info, name) for name in ("nodes", "keys", "used_memory", "maxmemory")},
            **{name: _number(info, name) for name in ("keyspace_hits", "keyspace_misses")},
            **{name: _number(info, name) for name in ("evicted_keys", "expired_keys")},
        ),
    )


def _number(info: dict[str, int | str], name: str) -> int:
    value = info.get(name, 0)
    return value if isinstance(value, int) else 0


def _model(catalogue: Catalogue, model: str, capacity: int, now: float) -> ModelPart:
    sums: dict[str, dict[EntryKind, list[int]]] = defaultdict(lambda: {kind: [0, 0] for kind in _KINDS})
    for item in catalogue.entries:
        if item.of.model == model:
            total = sums[item.of.tenant][item.of.kind]
            total[0] += 1
            total[1] += item.size
    pools = [pool for pool in catalogue.pools if pool.of.model == model]
    for pool in pools:
        sums[pool.of.tenant][EntryKind.POOL][0] += 1
    tenants = [
        TenantPart(tenant, {kind.value: Kind(*kinds[kind]) for kind in _KINDS}, sum(n for _, n in kinds.values()))
        for tenant, kinds in sorted(sums.items())
    ]
    named = {
        line.pool: _PoolEdge(line.edge.source, line.edge.destination, line.edge.slot)
        for line in catalogue.edges
        if line.model == model
    }
    edges = []
    for pool in pools:
        edge = named.get(pool.name, _UNNAMED)
        used = [now - score for _, score in pool.members]
        edges.append(
            EdgePart(
                tenant=pool.of.tenant,
                source=edge.source,
                destination=edge.destination,
                slot=edge.slot,
                rank=pool.of.rank,
                ranks=pool.of.size,
                anchors=len(pool.members),
                capacity=capacity,
                newest_seconds=max(0.0, min(used)) if used else None,
                oldest_seconds=max(0.0, max(used)) if used else None,
            )
        )
    edges.sort(key=lambda e: (e.tenant, e.source, e.destination, e.slot, e.ranks, e.rank))
    return ModelPart(model, tenants, edges, sum(m == model for m, _, _ in catalogue.warm))


def show(found: Inspection, console: Console) -> None:
    """For a terminal of 80 columns."""
    server = found.server
    console.print(f"{found.url}  Redis {server.version}, prefix {found.prefix}", highlight=False)
    if not found.keys:
        console.print(f"nothing under {found.prefix}: no server has written here yet, or all of it has expired")
    for model in found.models:
        table = plain_table(f"model {model.model}", "tenant", "kind", "entries", "bytes", "share", left=2)
        for tenant in model.tenants:
            for kind, total in tenant.kinds.items():
                if total.entries:
                    share = f"{total.bytes / found.bytes:.0%}" if found.bytes else ""
                    pool = kind == EntryKind.POOL.value
                    cells = ("", "") if pool else (size(total.bytes), share)
                    table.add_row(tenant.tenant, kind, str(total.entries), *cells)
        console.print(table)
        if model.edges:
            _show_edges(model.edges, console)
        if model.warmed_contexts:
            console.print(f"{model.warmed_contexts} contexts were put there by `kvcmas warmup`")
    lives, idle = found.ttl_seconds, found.idle_seconds
    rows = [
        ("ours", f"{found.keys} keys, {found.entries} entries of {size(found.bytes)}"),
        ("life left", f"{age(lives.min)} at least, {age(lives.median)} median" if lives else "for ever"),
        (
            "unused for",
            f"{age(idle.median)} median, {age(idle.min)} at least; {found.unused_entries} entries for more than a day"
            if idle
            else "not known (ttl_seconds is 0)",
        ),
        (
            "memory",
            f"{size(server.used_memory)} of {size(server.maxmemory) if server.maxmemory else 'no limit'}, "
            f"policy {server.maxmemory_policy}",
        ),
        ("server", f"{server.keys} keys on {server.nodes} node(s), of whomever"),
        ("reads", f"{server.keyspace_hits} hits, {server.keyspace_misses} misses, of whomever, since it started"),
        ("gone", f"{server.evicted_keys} evicted, {server.expired_keys} expired, of whomever"),
    ]
    table = plain_table("", "", "", left=2)
    table.show_header = False
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _show_edges(edges: Sequence[EdgePart], console: Console) -> None:
    table = plain_table(
        "edges, by last use", "tenant", "source → destination", "slot", "anchors", "newest", "oldest", left=2
    )
    for edge in edges:
        name = f"{edge.source} → {edge.destination}" if edge.slot >= 0 else "? (no line in the hash of edges)"
        rank = f" (rank {edge.rank} of {edge.ranks})" if edge.ranks > 1 else ""
        table.add_row(
            edge.tenant,
            name + rank,
            str(edge.slot) if edge.slot >= 0 else "?",
            f"{edge.anchors}/{edge.capacity}",
            age(edge.newest_seconds),
            age(edge.oldest_seconds),
        )
    console.print(table)
