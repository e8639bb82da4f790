"""Active caches of runs that were just captured, at full width on the device, until their deltas are in the store.

Without it, the next agent of a chain would have to wait for the factorisation of what the previous one left.
"""

import threading
from collections import OrderedDict
from typing import NamedTuple

from torch import Tensor


class HotRun(NamedTuple):
    """A captured run as attention read it: ``k`` (rotated) and ``v``, ``[L, T, C]``; row 0 stands at ``position``."""

    k: Tensor
    v: Tensor
    position: int

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class HotTier:
    """At most ``budget`` bytes of runs by the key of their delta, least recently used first out. Thread-safe."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._runs: OrderedDict[bytes, HotRun] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, key: bytes, run: HotRun) -> None:
        """Keep ``run``; one that is larger than the whole budget is not kept."""
        with self._lock:
            self._drop(key)
            if run.nbytes > self._budget:
                return
            self._runs[key] = run
            self._bytes += run.nbytes
            while self._bytes > self._budget:
                self._drop(next(iter(self._runs)))

    def get(self, key: bytes) -> HotRun | None:
        with self._lock:
            if key in self._runs:
                self._runs.move_to_end(key)
            return self._runs.get(key)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def clear(self) -> None:
        with self._lock:
            self._runs.clear()
            self._bytes = 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless the bytes add up and fit the budget."""
        with self._lock:
            assert self._bytes == sum(run.nbytes for run in self._runs.values()) <= self._budget

    def _drop(self, key: bytes) -> None:
        run = self._runs.pop(key, None)
        if run is not None:
            self._bytes -= run.nbytes
