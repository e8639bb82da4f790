"""`kvcmas verify`: every entry read and checked, as a server would check it before it uses one."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from lmcache_kvcmas import codecs
from lmcache_kvcmas.anchors import Anchor
from lmcache_kvcmas.connectors.commands.catalogue import (
    BATCH,
    Catalogue,
    Item,
    anchor_name,
    batches,
    entry_name,
    read_catalogue,
    remove_names,
    sized_batches,
)
from lmcache_kvcmas.connectors.commands.opened import open_redis
from lmcache_kvcmas.connectors.commands.shown import plain_table, size
from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_names import EntryName, model_mark
from lmcache_kvcmas.entries import EntryKind, decode, read_header
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.factors import Factors
from lmcache_kvcmas.keys import KEY_BYTES
from lmcache_kvcmas.manifest import Needed, from_tensors, needed

_BATCH_BYTES = 16 << 20

Tick = Callable[[int], object]
"""Hears of bytes that were read."""


@dataclass(frozen=True, slots=True)
class Damage:
    name: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` found. Only ``damaged`` is wrong; eviction and expiry leave the rest behind every day."""

    checked: Mapping[EntryKind, int]
    bytes_read: int
    vanished: int
    """Entries that went between listing and reading."""
    damaged: tuple[Damage, ...]
    dangling: Mapping[bytes, tuple[bytes, ...]]
    """By pool: members that have no anchor (or a damaged one)."""
    incomplete: Mapping[bytes, int]
    """By record: entries that it needs and that no ranks have all of."""


@dataclass
class _Seen:
    """Gathered while reading."""

    checked: dict[EntryKind, int] = field(default_factory=lambda: defaultdict(int))
    bytes_read: int = 0
    vanished: int = 0
    damaged: list[Damage] = field(default_factory=list)
    records: dict[Item, tuple[Needed, ...]] = field(default_factory=dict)


def run_verify(file: Path | None, repair: bool, most: int) -> bool:
    """True if nothing is damaged. Raises ConfigError or RedisUnavailable."""
    with open_redis(file) as opened:
        client, prefix = opened.client, opened.settings.prefix
        catalogue = read_catalogue(client, prefix)
        columns = (TextColumn("reading"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("", total=catalogue.total_bytes)
            verdict = verify(client, catalogue, lambda n: bar.update(task, advance=n))
        show(verdict, Console(), most)
        if repair:
            removed, members = mend(client, verdict)
            Console().print(f"repaired: {removed} entries and {members} pool members removed")
    return not verdict.damaged


def verify(client: RedisClient, catalogue: Catalogue, tick: Tick = lambda n: None) -> Verdict:
    """Reads and checks all entries of ``catalogue``. Their lives are not prolonged by it.

    Raises:
        RedisUnavailable: a part could not be read.
    """
    seen = _Seen()
    for batch in sized_batches(catalogue.entries, BATCH, _BATCH_BYTES):
        blobs = client.head_many([item.name for item in batch], max(1, *(item.size for item in batch)))
        for item, blob in zip(batch, blobs, strict=True):
            tick(item.size)
            if not blob and item.size:
                seen.vanished += 1
                continue
            seen.checked[item.of.kind] += 1
            seen.bytes_read += len(blob)
            try:
                points_at = check(item.of, blob)
            except EntryError as error:
                seen.damaged.append(Damage(item.name, str(error)))
                continue
            if points_at is not None:
                seen.records[item] = points_at
    damaged = {damage.name for damage in seen.damaged}
    bad_members, dangling = _pools(client, catalogue, damaged)
    return Verdict(
        dict(seen.checked),
        seen.bytes_read,
        seen.vanished,
        (*seen.damaged, *bad_members),
        dangling,
        _incomplete(client, catalogue, seen.records, damaged),
    )


def check(of: EntryName, blob: bytes) -> tuple[Needed, ...] | None:
    """What the record ``blob`` points at; None for another kind.

    Raises:
        EntryError: it is not what its name says, or its content is not what its kind has.
    """
    header = read_header(blob)
    if (model_mark(header.model), header.tp_rank, header.tp_size) != (of.model, of.rank, of.size):
        raise EntryError(f"the entry belongs to {header.owner}, its name to {of.model}, rank {of.rank} of {of.size}")
    buffer = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    entry = decode(buffer, kind=of.kind, owner=header.owner, key=of.key)
    tensors = entry.tensors
    if of.kind is EntryKind.RECORD:
        return needed(from_tensors(of.key, tensors, entry.header.meta))
    if of.kind is EntryKind.ANCHOR:
        Anchor.from_tensors(tensors)
    elif of.kind is EntryKind.DELTA:
        _check_delta(tensors)
    elif of.kind is EntryKind.BASE:
        k = tensors.get("k")
        codecs.read(tensors, entry.header.meta, 0, k.shape[1] if k is not None and k.ndim == 3 else 1)
    return None


def _check_delta(tensors: Mapping[str, Tensor]) -> None:
    parts = {part: {n[2:]: t for n, t in tensors.items() if n.startswith(f"{part}.")} for part in ("k", "v")}
    if sum(map(len, parts.values())) != len(tensors):
        raise EntryError(f"a delta has factors k and v; got {', '.join(tensors)}")
    k, v = (Factors.from_tensors(parts[part]) for part in ("k", "v"))
    if (k.layers, k.tokens, k.channels) != (v.layers, v.tokens, v.channels):
        raise EntryError("a delta's k and v differ in shape")


def _pools(
    client: RedisClient, catalogue: Catalogue, damaged: set[bytes]
) -> tuple[list[Damage], dict[bytes, tuple[bytes, ...]]]:
    bad: list[Damage] = []
    dangling: dict[bytes, tuple[bytes, ...]] = {}
    for pool in catalogue.pools:
        members = [member for member, _ in client.set_members(pool.name)]  # afresh: anchors come and go
        wrong = [member for member in members if len(member) != KEY_BYTES]
        if wrong:
            bad.append(Damage(pool.name, f"{len(wrong)} members are no anchors' keys"))
        names = {m: anchor_name(catalogue.prefix, pool.of, m) for m in members if len(m) == KEY_BYTES}
        there = _there(client, names.values())
        gone = tuple(m for m, name in names.items() if name not in there or name in damaged)
        if gone or wrong:
            dangling[pool.name] = (*gone, *wrong)
    return bad, dangling


def _there(client: RedisClient, names: Iterable[bytes]) -> set[bytes]:
    asked = list(names)
    found = [here for batch in batches(asked, BATCH) for here in client.exists_many(batch)]
    return {name for name, here in zip(asked, found, strict=True) if here}


def _incomplete(
    client: RedisClient, catalogue: Catalogue, records: Mapping[Item, tuple[Needed, ...]], damaged: set[bytes]
) -> dict[bytes, int]:
    """Records that no number of ranks has all entries of. What seems to be missing is asked for once more.

    Entries may have come after the list was made; a record that was written before them would look incomplete.
    """
    ranks: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for item in catalogue.entries:
        if item.of.kind is not EntryKind.RECORD:
            ranks[item.of.model, item.of.tenant].add((item.of.rank, item.of.size))
    listed = {item.name for item in catalogue.entries} - damaged
    found: dict[bytes, int] = {}
    for item, points_at in records.items():
        sizes = sorted({size for _, size in ranks[item.of.model, item.of.tenant]}) or [1]
        fewest = len(points_at)
        for ranks_of in sizes:
            names = {
                n: [entry_name(catalogue.prefix, item.of.model, n.kind, r, ranks_of, n.key) for r in range(ranks_of)]
                for n in points_at
            }
            lacking = {name for group in names.values() for name in group} - listed
            lacking -= _there(client, lacking - damaged)
            fewest = min(fewest, sum(any(name in lacking for name in group) for group in names.values()))
        if fewest:
            found[item.name] = fewest
    return found


def mend(client: RedisClient, verdict: Verdict) -> tuple[int, int]:
    """Removes records that are of no use, then what is damaged, then pool members without anchor. How many went."""
    pools = set(verdict.dangling)
    names = [*verdict.incomplete, *(d.name for d in verdict.damaged if d.name not in pools)]
    removed = remove_names(client, list(dict.fromkeys(names)))
    for pool, members in verdict.dangling.items():
        client.set_remove(pool, members)
    return removed, sum(map(len, verdict.dangling.values()))


def show(verdict: Verdict, console: Console, most: int) -> None:
    """Counts, and the first ``most`` names of what is damaged."""
    table = plain_table("checked", "kind", "entries")
    for kind, count in verdict.checked.items():
        table.add_row(kind.value, str(count))
    console.print(table)
    console.print(f"read         {size(verdict.bytes_read)}")
    if verdict.vanished:
        console.print(f"vanished     {verdict.vanished} entries went while this ran")
    dangling = sum(map(len, verdict.dangling.values()))
    console.print(f"dangling     {dangling} pool members without an anchor (eviction does that)")
    console.print(f"incomplete   {len(verdict.incomplete)} records that lack entries (eviction does that)")
    console.print(f"damaged      {len(verdict.damaged)}", style="red" if verdict.damaged else "green")
    for damage in verdict.damaged[:most]:
        console.print(f"  {damage.name.decode('utf-8', 'replace')}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"    {damage.reason}", markup=False, highlight=False)
    if len(verdict.damaged) > most:
        console.print(f"  … and {len(verdict.damaged) - most} more (--show N)")
