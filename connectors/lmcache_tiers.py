"""LMCache's CPU and disk backends, one object each, with what they leave undone put right.

Each workaround names what goes wrong without it. All of it acts on our own instances; no class of LMCache is changed.
"""

import contextlib
import logging
from collections import deque
from pathlib import Path
from typing import Any

import torch

from lmcache_kvcmas.connectors.disk_folder import DiskFolder
from lmcache_kvcmas.connectors.eviction import EntryPolicy
from lmcache_kvcmas.connectors.lmcache_api import CacheEngineKey, OpType
from lmcache_kvcmas.entries import EntryKind, Owner

_LOG = logging.getLogger(__name__)


class _Full(logging.Filter):
    """A full tier that evicts is normal operation; LMCache warns each time."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Failed to allocate memory block")


logging.getLogger("lmcache.v1.memory_management").addFilter(_Full())


def entry_name(owner: Owner, key: bytes) -> Any:
    """LMCache's form of a key. The rank goes in here: the scheduler hands out one key for all of them."""
    return CacheEngineKey("kvcmas", owner.tp_size, owner.tp_rank, int.from_bytes(key, "big"), torch.uint8)


class EventTap:
    """Stands in for LMCache's sender of controller messages: the one place that hears of every eviction."""

    def __init__(self) -> None:
        self.left: deque[int] = deque()
        """Chunk hashes of keys that left the tier."""
        self.count = 0

    def add_kv_op(self, op_type: Any, key: int) -> None:
        if op_type == OpType.EVICT:
            self.count += 1
            self.left.append(key)

    def flush(self) -> None: ...

    def close(self) -> None: ...


class CPUTier:
    """Entries in memory: ``max_local_cpu_size``, in one arena, each at a multiple of 4 KiB."""

    def __init__(self, backend: Any, budget: int) -> None:
        self._backend = backend
        self.tap = EventTap()
        self.budget = budget
        backend.batched_msg_sender = self.tap
        # Other tiers allocate here too, with LMCache's default: to wait, without an end, for memory to come free.
        self._allocate = backend.allocate
        backend.allocate = self.allocate
        self._policy = EntryPolicy()
        backend.cache_policy = self._policy  # while it holds nothing

    def allocate(
        self, shapes: Any, dtypes: Any, fmt: Any = None, eviction: bool = True, busy_loop: bool = False
    ) -> Any:
        """A memory object with one reference, or None: at once, and evicting only if that can make enough room."""
        found = self._allocate(shapes, dtypes, fmt, eviction=False)
        if found is None and eviction and self._could_free() >= _size(shapes, dtypes):
            found = self._allocate(shapes, dtypes, fmt, busy_loop=False)
        return found

    def _could_free(self) -> int:
        with self._backend.cpu_lock:
            idle: int = sum(obj.get_physical_size() for obj in self._backend.hot_cache.values() if obj.can_evict)
        return self.budget - self.used() + idle

    def put(self, name: Any, obj: Any, kind: EntryKind) -> None:
        with self._backend.cpu_lock:
            self._policy.expect(name, kind)
        self._backend.batched_submit_put_task([name], [obj])

    def get(self, name: Any) -> Any:
        """A memory object with a reference of ours, or None. Counts as a use: LMCache's own get does not."""
        obj = self._backend.get_blocking(name)
        if obj is not None:
            with self._backend.cpu_lock:
                if name in self._backend.hot_cache:
                    self._policy.update_on_hit(name, self._backend.hot_cache)
        return obj

    def contains(self, name: Any) -> bool:
        return bool(self._backend.contains(name))

    def remove(self, name: Any) -> bool:
        return bool(self._backend.remove(name))

    def entries(self) -> int:
        return len(self._backend.hot_cache)

    def used(self) -> int:
        """Bytes of the arena that are taken."""
        return int(self._backend.memory_allocator.pin_allocator.address_manager.total_allocated_size)


class DiskTier:
    """Entries in files of their own, written behind the caller's back."""

    def __init__(self, backend: Any, budget: int, folder: DiskFolder) -> None:
        self._backend = backend
        self.tap = EventTap()
        self.budget = budget
        self.folder = folder
        self.failures = 0
        self._drifted = False
        self._unwanted: set[Any] = set()
        backend.batched_msg_sender = self.tap
        self._save = backend.async_save_bytes_to_disk
        backend.async_save_bytes_to_disk = self._save_or_undo

    def _save_or_undo(self, key: Any, memory_obj: Any, on_complete_callback: Any = None) -> None:
        """LMCache's save, which on an error (a full disk) would hold the entry's memory and its budget for good."""
        size = memory_obj.get_physical_size()
        try:
            self._save(key=key, memory_obj=memory_obj, on_complete_callback=on_complete_callback)
        except Exception as error:
            with self._backend.disk_lock:
                self._backend.current_cache_size -= size
            memory_obj.ref_count_down()
            self._backend.disk_worker.remove_put_task(key)
            with contextlib.suppress(OSError):
                Path(self._backend._key_to_path(key)).unlink()
            self._failed(error)
        if key in self._unwanted:
            self._unwanted.discard(key)
            self.remove(key)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            _LOG.warning("an entry could not be written to disk (further ones are only counted): %s", error)

    def put(self, name: Any, obj: Any) -> None:
        """Begins to write; never raises. LMCache drops what does not fit beside entries that are being read."""
        self._reconcile()
        try:
            self._backend.batched_submit_put_task([name], [obj])
        except Exception as error:
            self._failed(error)

    def get(self, name: Any) -> Any:
        """A memory object with a reference of ours, or None. Raises if there is no memory or no file."""
        try:
            return self._backend.get_blocking(name)
        except Exception:
            self._drifted = True
            raise

    def contains(self, name: Any) -> bool:
        return bool(self._backend.contains(name))

    def remove(self, name: Any) -> None:
        """Removes the file, now or as soon as it is written."""
        if name in self.writing():
            self._unwanted.add(name)
        with contextlib.suppress(OSError):
            self._drifted |= bool(self._backend.remove(name))

    def _reconcile(self) -> None:
        """LMCache gives back the budget of what it evicts, but not of what is removed or found to be gone."""
        backend = self._backend
        with backend.disk_lock, backend.disk_worker.put_lock:
            if self._drifted and not backend.disk_worker.put_tasks:
                backend.current_cache_size = sum(held.size for held in backend.dict.values())
                self._drifted = False

    def writing(self) -> frozenset[Any]:
        """Names of entries that are on their way to disk."""
        with self._backend.disk_worker.put_lock:
            return frozenset(self._backend.disk_worker.put_tasks)

    def entries(self) -> int:
        return len(self._backend.dict)

    def used(self) -> int:
        self._reconcile()
        return int(self._backend.current_cache_size)


def _size(shapes: Any, dtypes: Any) -> int:
    if isinstance(dtypes, list):
        return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    return int(shapes.numel() * dtypes.itemsize)
