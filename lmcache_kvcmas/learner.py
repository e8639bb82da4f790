"""Learning, off the critical path: one thread that factorises what finished requests left."""

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from lmcache_kvcmas.edges import EdgeBook
from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.factors import Factors
from lmcache_kvcmas.hot import HotRun
from lmcache_kvcmas.kernels.rope import RopeTable
from lmcache_kvcmas.lessons import Stretch, anchor_of, delta_factors
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.spans import Edge
from lmcache_kvcmas.store import EntryStore, put

_NICENESS = 10  # about a tenth of a core beside a busy engine, all of one beside an idle one
_PREPARE_EVERY = 2.0  # seconds; a busy edge costs a predictor that often, not one a lesson

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Compress:
    """Store a captured run as a low-rank difference to full-width roots."""

    key: bytes
    edge: Edge
    run: HotRun
    roots: Stretch
    leases: ExitStack

    @property
    def nbytes(self) -> int:
        return self.run.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Learn:
    """Offer the difference of a densely prefilled run to its edge's pool."""

    tenant: str
    edge: Edge
    run: HotRun
    source: Stretch
    offset: int
    leases: ExitStack

    @property
    def nbytes(self) -> int:
        return self.run.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Publish:
    """Tell other nodes of a record, after the differences that it needs."""

    record: Record

    @property
    def nbytes(self) -> int:
        return self.record.tokens.nbytes

    @property
    def leases(self) -> ExitStack:
        return ExitStack()


@dataclass(frozen=True, slots=True, eq=False)
class Refresh:
    """Take over what other nodes did to an edge's pool."""

    tenant: str
    edge: Edge

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def leases(self) -> ExitStack:
        return ExitStack()


Task = Compress | Learn | Publish | Refresh


class Learner:
    """Works through tasks in order. At most ``budget`` bytes wait; what comes on top is dropped, and counted.

    A dropped `Compress` makes its run a miss once the hot tier has forgotten it; a dropped `Learn` costs an anchor.
    """

    def __init__(self, store: EntryStore, book: EdgeBook, rope: RopeTable, rank: int, keep: int, budget: int) -> None:
        self._store, self._book, self._rope = store, book, rope
        self._rank, self._keep, self._budget = rank, keep, budget
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._waiting = 0
        self._idle = threading.Condition()
        self.counts: Counter[str] = Counter()
        """Tasks by what became of them: ``compressed``, ``learned``, ``published``, ``refreshed``, ``unchanged``,
        ``dropped``, ``no_room``, ``failed``."""
        self._thread = threading.Thread(target=self._work, name="kvcmas-learner", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> bool:
        """Queue ``task``; False if too much waits already. Takes over the task's leases either way."""
        with self._idle:
            if self._waiting + task.nbytes > self._budget and self._waiting:
                self.counts["dropped"] += 1
                task.leases.close()
                return False
            self._waiting += task.nbytes
        self._tasks.put(task)
        return True

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; False if ``timeout`` seconds were not enough."""
        with self._idle:
            return self._idle.wait_for(lambda: self._waiting == 0, timeout)

    def close(self, timeout: float = 2.0) -> None:
        """Finish the current task and stop. What still waits is not learned."""
        self._budget = -1
        self._tasks.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        _yield_to_others()
        prepared = time.monotonic()
        done: dict[type[Task], Callable[..., str]] = {
            Compress: self._compress,
            Learn: self._learn,
            Publish: self._publish,
            Refresh: self._refresh,
        }
        while (task := self._tasks.get()) is not None:
            try:
                with task.leases, torch.inference_mode():
                    outcome = done[type(task)](task) if self._budget >= 0 else "dropped"
            except Exception:  # a lesson lost is a cache entry less; the thread has to live on
                logger.exception("kvcmas: a lesson was lost")
                outcome = "failed"
            # Once for several lessons of an edge, but not only when nothing waits: a busy engine always has a next one.
            if self._tasks.empty() or time.monotonic() > prepared + _PREPARE_EVERY:
                self._prepare()
                prepared = time.monotonic()
            with self._idle:
                self.counts[outcome] += 1
                self._waiting -= task.nbytes
                self._idle.notify_all()

    def _prepare(self) -> None:
        try:
            with torch.inference_mode():
                self._book.tell()
                self._book.prepare()
        except Exception:
            logger.exception("kvcmas: a predictor was not built")

    def _compress(self, task: Compress) -> str:
        delta_k, delta_v = delta_factors(task.run, task.roots, self._rope, self._rank)
        tensors = named(delta_k, delta_v)
        stored = put(self._store, task.key, EntryKind.DELTA, tensors, task.edge._asdict())
        return "compressed" if stored else "no_room"

    def _learn(self, task: Learn) -> str:
        anchor = anchor_of(task.run, task.source, self._rope, self._rank, self._keep, task.offset)
        self._book.learn(task.tenant, task.edge, anchor)
        return "learned"

    def _publish(self, task: Publish) -> str:
        self._store.publish(task.record)
        return "published"

    def _refresh(self, task: Refresh) -> str:
        return "refreshed" if self._book.refresh(task.tenant, task.edge) else "unchanged"


def named(delta_k: Factors, delta_v: Factors) -> dict[str, Tensor]:
    """The tensors of a DELTA entry."""
    parts = {"k": delta_k, "v": delta_v}
    return {f"{part}.{name}": t for part, factors in parts.items() for name, t in factors.tensors().items()}


def _yield_to_others() -> None:
    """Keep this thread from slowing down the engine's.

    A lower priority where threads have one (Linux), and every core of the process: vLLM's CPU worker binds its threads
    to a core each, and this one would share that of the thread that all others wait for. And one torch thread: a second
    one would meet the engine's workers on every core, and a team of threads that share their cores spends its time
    waiting for one another.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        os.sched_setaffinity(0, set[int]().union(*(os.sched_getaffinity(thread) for thread in threads)))
    except (AttributeError, OSError):
        logger.debug("kvcmas: the learner's thread keeps its priority and its core")
    # Not torch.set_num_threads: vLLM's CPU worker replaces that one by a warning. It counts for the calling thread, and
    # for threads that start later: a second thread restores what those get.
    set_threads = torch._C.set_num_threads
    before = torch.get_num_threads()
    set_threads(1)
    restore = threading.Thread(target=set_threads, args=(before,))
    restore.start()
    restore.join()
