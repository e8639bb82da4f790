"""What comes from the shared tier into LMCache's CPU tier, and what goes out to it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lmcache_kvcmas.connectors import lmcache_api as lm
from lmcache_kvcmas.connectors.lmcache_tiers import CPUTier, entry_name
from lmcache_kvcmas.entries import EntryKind, ForeignEntryError, Owner, TensorSpec, decode, lay_out
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.manifest import Needed, to_tensors
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.shared import SharedTier
from lmcache_kvcmas.store import MissCause, NotHad

PREFETCH_BATCH = 4
"""Entries that are read in one time-out of the shared tier: 128 MiB, for chunks of 256 tokens of an 8B model."""


class SharedTraffic:
    """Between ``tier`` and one rank's memory, without copies. ``missed`` is told of what came, but was no good."""

    def __init__(
        self, tier: SharedTier, cpu: CPUTier, owner: Owner, missed: Callable[[MissCause, EntryError], None]
    ) -> None:
        self.tier, self._cpu, self._owner, self._missed = tier, cpu, owner, missed

    def prefetch(self, absent: Sequence[Needed]) -> NotHad:
        """See ``EntryStore.prefetch``."""
        gone: list[Needed] = []
        for begin in range(0, len(absent), PREFETCH_BATCH):
            batch = absent[begin : begin + PREFETCH_BATCH]
            not_had = self._read(batch)
            gone += not_had.gone
            if not_had.unreachable:  # a plan is of use up to its first hole only
                rest = absent[begin + PREFETCH_BATCH :]
                return NotHad(tuple(gone), (*not_had.unreachable, *rest))
        return NotHad(tuple(gone))

    def put(self, entry: Needed, obj: Any, size: int, release: Callable[[], None]) -> None:
        """Queue the first ``size`` bytes of a memory object; ``release`` is called once they may change."""
        self.tier.put(entry, _view(obj, size), release)

    def publish(self, record: Record) -> None:
        """Queue the manifest of ``record``."""
        tensors, meta = to_tensors(record)
        owner = Owner(self._owner.model)
        layout = lay_out(EntryKind.RECORD, record.id, owner, {n: TensorSpec.of(t) for n, t in tensors.items()}, meta)
        buffer = torch.empty(layout.size, dtype=torch.uint8)
        for name, view in layout.views(buffer).items():
            view.copy_(tensors[name])
        layout.seal(buffer)
        self.tier.publish(record, buffer.numpy().data)

    def _read(self, batch: Sequence[Needed]) -> NotHad:
        read: dict[int, tuple[Any, int]] = {}
        refused: set[int] = set()

        def allocate(index: int, size: int) -> memoryview | None:
            obj = self._cpu.allocate(torch.Size([size]), torch.uint8, lm.MemoryFormat.HS_TD) if size else None
            if obj is None:
                refused.add(index)
                return None
            read[index] = obj, size
            return _view(obj, size)

        there = self.tier.read(batch, allocate)
        gone, unreachable = [], []
        for index, entry in enumerate(batch):
            if there is None or there[index] is None or (index in refused and not there[index]):
                unreachable.append(entry)
            elif not (there[index] and index in read and self._accept(entry, *read[index])):
                gone.append(entry)
        for obj, _ in read.values():
            obj.ref_count_down()
        return NotHad(tuple(gone), tuple(unreachable))

    def _accept(self, entry: Needed, obj: Any, size: int) -> bool:
        """Put what was read into memory, if it is what it should be."""
        try:
            decode(obj.raw_data[:size], kind=entry.kind, owner=self._owner, key=entry.key)
        except EntryError as error:
            self.tier.remove(entry)
            self._missed(cause_of(error), error)
            return False
        name = entry_name(self._owner, entry.key)
        self._cpu.put(name, obj, entry.kind)
        return self._cpu.contains(name)


def cause_of(error: EntryError) -> MissCause:
    """Why an entry that is there is a miss."""
    return MissCause.FOREIGN if isinstance(error, ForeignEntryError) else MissCause.DAMAGED


def _view(obj: Any, size: int) -> memoryview:
    """The first ``size`` bytes of a memory object."""
    return obj.raw_data[:size].numpy().data  # type: ignore[no-any-return]
