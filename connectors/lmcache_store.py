"""The entry store on LMCache's ``StorageManager``: CPU tier, disk tier if configured, with or without a GPU.

LMCache allocates, evicts, writes to disk and reads back; ours is what an entry is (``lmcache_kvcmas.entries``), that it
is verified, and that no call waits. LMCache's engine, token database and connector are not involved.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmcache_kvcmas.connectors import lmcache_api as lm
from lmcache_kvcmas.connectors.lmcache_handles import LMCacheLease, LMCacheReservation
from lmcache_kvcmas.connectors.lmcache_shared import SharedTraffic, cause_of
from lmcache_kvcmas.connectors.lmcache_tiers import CPUTier, DiskTier, entry_name
from lmcache_kvcmas.entries import EntryKind, Meta, Owner, TensorSpec, decode, lay_out
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.manifest import Needed
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.shared import SharedTier
from lmcache_kvcmas.store import MissCause, NotHad, StoreStats

_LOG = logging.getLogger(__name__)

CLOSE_SECONDS = 4.5
_FLUSH_SECONDS = 3.0


class LMCacheStore:
    """See ``store.EntryStore``. Opened by ``lmcache_open.open_store``."""

    def __init__(
        self, manager: Any, owner: Owner, cpu: CPUTier, disk: DiskTier | None, shared: SharedTier | None
    ) -> None:
        self._manager, self._owner, self._cpu, self._disk = manager, owner, cpu, disk
        self._traffic = SharedTraffic(shared, cpu, owner, self._count_miss) if shared is not None else None
        self._lock = threading.Lock()
        self._misses: Counter[MissCause] = Counter()
        self._hits = self._stored = self._refused = self._open = 0
        self._removed = 0
        """Of the events that the CPU tier's tap has counted: those that were no evictions."""
        self._undecided: dict[int, None] = {}
        self._closed = False

    # --- EntryStore ---

    def reserve(
        self, key: bytes, kind: EntryKind, tensors: Mapping[str, TensorSpec], meta: Meta
    ) -> LMCacheReservation | None:
        layout = lay_out(kind, key, self._owner, tensors, meta)
        if not self._enter():
            return None
        obj = self._cpu.allocate(torch.Size([layout.size]), torch.uint8, lm.MemoryFormat.HS_TD)
        if obj is None:
            with self._lock:
                self._refused += 1
            self._leave()
            return None
        return LMCacheReservation(
            layout,
            obj,
            commit=lambda sealed: self._commit(Needed(key, kind), sealed, layout.size),
            release=self._release,
        )

    def get(self, key: bytes, kind: EntryKind) -> LMCacheLease | None:
        if not self._enter():
            return None
        try:
            obj = self._fetch(self._name(key), kind)
        except Exception as error:  # whatever a tier raises is a miss
            return self._missed(MissCause.FAILED, error)
        if obj is None:
            return self._missed(MissCause.ABSENT, None)
        try:
            entry = decode(obj.raw_data[: obj.get_size()], kind=kind, owner=self._owner, key=key)
        except EntryError as error:
            obj.ref_count_down()
            # What answers to this key wrongly would do so for ever: puts do not replace.
            self._drop(self._name(key))
            if self._traffic:
                self._traffic.tier.remove(Needed(key, kind))
            return self._missed(cause_of(error), error)
        with self._lock:
            self._hits += 1
        return LMCacheLease(entry, obj, release=self._release)

    @property
    def shared(self) -> SharedTier | None:
        return self._traffic.tier if self._traffic else None

    def prefetch(self, wanted: Sequence[Needed]) -> NotHad:
        absent = tuple(w for w in wanted if not self._holds(self._name(w.key)))
        if not absent or self._traffic is None or not self._enter():
            return NotHad(gone=absent)
        try:
            return self._traffic.prefetch(absent)
        finally:
            self._leave()

    def share(self, entry: Needed) -> bool:
        traffic = self._traffic
        obj = self._cpu.get(self._name(entry.key)) if traffic and not self._closed else None
        if traffic is None or obj is None:
            return False
        self._share(traffic, entry, obj, obj.get_size())
        obj.ref_count_down()
        return True

    def publish(self, record: Record) -> None:
        if self._traffic is not None:
            self._traffic.publish(record)

    def contains(self, key: bytes) -> bool:
        return not self._closed and self._holds(self._name(key))

    def remove(self, key: bytes) -> None:
        if not self._closed:
            self._drop(self._name(key))

    def take_evicted(self) -> list[bytes]:
        taps = [self._cpu.tap, *([self._disk.tap] if self._disk else [])]
        with self._lock:
            for tap in taps:
                while tap.left:
                    self._undecided[tap.left.popleft()] = None
            if not self._undecided:
                return []
            writing = {name.chunk_hash for name in self._disk.writing()} if self._disk else set()
            gone: list[bytes] = []
            waiting: dict[int, None] = {}
            for number in self._undecided:
                key = number.to_bytes(32, "big")
                if number in writing:
                    waiting[number] = None
                elif self._closed or not self._holds(self._name(key)):
                    gone.append(key)
            self._undecided = waiting
            return gone

    def stats(self) -> StoreStats:
        disk = self._disk
        with self._lock:
            return StoreStats(
                entries=self._cpu.entries(),
                bytes_used=self._cpu.used(),
                bytes_budget=self._cpu.budget,
                disk_entries=disk.entries() if disk else 0,
                disk_bytes=disk.used() if disk else 0,
                disk_budget=disk.budget if disk else 0,
                leased=self._open,
                hits=self._hits,
                misses=dict(self._misses),
                stored=self._stored,
                refused=self._refused,
                evictions=self._cpu.tap.count - self._removed,
                disk_failures=disk.failures if disk else 0,
                shared=dict(self.shared.counts) if self.shared else {},
            )

    def flush(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self._disk and self._disk.writing():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return self.shared is None or self.shared.flush(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + CLOSE_SECONDS
        self.flush(_FLUSH_SECONDS)
        if self.shared:
            self.shared.close()
        # LMCache closes its CPU tier first, and with it frees memory that the disk tier may still be writing from.
        closing = threading.Thread(target=self._close_tiers, name="kvcmas-close", daemon=True)
        closing.start()
        closing.join(max(0.0, deadline - time.monotonic()))
        if closing.is_alive():
            _LOG.warning("LMCache's tiers did not close within %.1f s and were left behind", CLOSE_SECONDS)

    def prove(self) -> str | None:
        """One entry through the CPU tier, before anything is counted. The step that failed, or None."""
        key = secrets.token_bytes(32)
        reservation = self.reserve(key, EntryKind.POOL, {"proof": TensorSpec((16,), torch.uint8)}, {})
        if reservation is None:
            return "reserve"
        reservation.tensors["proof"].copy_(torch.arange(16, dtype=torch.uint8))
        if not reservation.commit():
            return "commit"
        with self.get(key, EntryKind.POOL) or contextlib.nullcontext() as lease:
            if lease is None or lease.tensors["proof"].tolist() != list(range(16)):
                return "get"
        self.remove(key)
        if self.contains(key):
            return "remove"
        if self.take_evicted() != [key]:
            return "report"
        with self._lock:
            self._misses.clear()
            self._hits = self._stored = self._refused = 0
        return None

    # --- for the reservations and leases above ---

    def _commit(self, entry: Needed, obj: Any, size: int) -> bool:
        """Puts a sealed entry into every tier; a tier that fails costs that tier only."""
        name, kind = self._name(entry.key), entry.kind
        held = False
        try:
            if kind is EntryKind.POOL:
                self._drop(name)
            self._cpu.put(name, obj, kind)
            held = self._cpu.contains(name)
            # A write to disk cannot be recalled, so what may change under its key stays in memory.
            if self._disk and kind is not EntryKind.POOL:
                self._disk.put(name, obj)
            if self._traffic and kind is not EntryKind.POOL:
                self._share(self._traffic, entry, obj, size)
        except Exception:
            _LOG.exception("an entry could not be stored")
        self._release(obj)
        with self._lock:
            self._stored += held
            self._refused += not held
        return held

    def _share(self, traffic: SharedTraffic, entry: Needed, obj: Any, size: int) -> None:
        """Queue an entry for the shared tier; its memory stays as it is until it is written."""
        obj.ref_count_up()
        with self._lock:
            self._open += 1
        traffic.put(entry, obj, size, lambda: self._release(obj))

    def _release(self, obj: Any) -> None:
        obj.ref_count_down()
        self._leave()

    # --- inside ---

    def _name(self, key: bytes) -> Any:
        return entry_name(self._owner, key)

    def _fetch(self, name: Any, kind: EntryKind) -> Any:
        obj = self._cpu.get(name)
        if obj is None and self._disk:
            obj = self._disk.get(name)
            if obj is not None:
                self._cpu.put(name, obj, kind)
        return obj

    def _holds(self, name: Any) -> bool:
        return self._cpu.contains(name) or bool(self._disk and self._disk.contains(name))

    def _drop(self, name: Any) -> None:
        if self._cpu.remove(name):
            with self._lock:
                self._removed += 1
        if self._disk:
            self._disk.remove(name)

    def _enter(self) -> bool:
        """Counts a use of the tiers' memory, which :meth:`close` leaves alone as long as there are any."""
        with self._lock:
            self._open += not self._closed
            return not self._closed

    def _leave(self) -> None:
        with self._lock:
            self._open -= 1

    def _missed(self, cause: MissCause, error: Exception | None) -> LMCacheLease | None:
        self._leave()
        self._count_miss(cause, error)
        return None

    def _count_miss(self, cause: MissCause, error: Exception | None) -> None:
        with self._lock:
            self._misses[cause] += 1
            first = self._misses[cause] == 1
        if first and error is not None:
            _LOG.warning("an entry was a miss (%s; further ones are only counted): %s", cause.value, error)

    def _close_tiers(self) -> None:
        for name in [name for name in self._manager.list_backends() if name != "LocalCPUBackend"]:
            self._manager.close_backend(name)
        with self._lock:
            in_use = self._open > 0
        if in_use or (self._disk and self._disk.writing()):
            # Whoever still reads keeps valid memory; it goes with the process.
            self._manager.storage_backends.pop("LocalCPUBackend", None)
        self._manager.close()
        if self._disk:
            self._disk.folder.close()
