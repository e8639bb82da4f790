"""One call of the Redis client: keys grouped by server, one deadline, breakers, counters, and who is to blame."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from lmcache_kvcmas.connectors.redis_errors import (
    Breaker,
    CallerError,
    Cause,
    RedisUnavailable,
    ReplyError,
    cause_of,
    foreseen,
)
from lmcache_kvcmas.connectors.redis_nodes import Cluster, Node, OneServer
from lmcache_kvcmas.connectors.redis_reads import Allocate, Budget, ReadBatch
from lmcache_kvcmas.connectors.redis_settings import RedisSettings
from lmcache_kvcmas.connectors.redis_wire import Command, Reply, Wire

T = TypeVar("T")


class RedisCalls:
    """What all calls share. Raises :class:`RedisUnavailable`, and whatever a function of the caller's raises."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self.stats: Counter[str] = Counter()
        self.budget = Budget(settings.max_inflight_bytes)
        self.reads, self.writes, self.others = (Breaker(settings.breaker_ms) for _ in range(3))
        """For refusals, which stop only their own kind of call; whether a server answers at all is its node's."""
        self.servers = (Cluster if settings.mode == "cluster" else OneServer)(
            settings, lambda name: self.add(**{name: 1})
        )
        self.closed = False
        self._counting = threading.Lock()

    def deadline(self) -> float:
        return time.monotonic() + self.settings.timeout_ms / 1000

    def add(self, **counts: int) -> None:
        with self._counting:
            self.stats.update(counts)

    def fail(self, error: Exception) -> NoReturn:
        """Counts it and raises it, as :class:`RedisUnavailable`."""
        if isinstance(error, CallerError):
            raise error.__cause__ or error
        if not foreseen(error):
            raise error
        cause = Cause.CLOSED if self.closed else cause_of(error)
        self.add(**{f"error_{cause.value}": 1})
        if isinstance(error, RedisUnavailable) and error.cause is cause:
            raise error
        raise RedisUnavailable(cause, f"{type(error).__name__}: {error}") from error

    def nodes(self) -> list[Node]:
        try:
            return self.servers.nodes(self.deadline())
        except Exception as error:
            self.fail(error)

    def on(self, node: Node, command: Command) -> Reply:
        """The reply to one command on one server."""
        deadline = self.deadline()
        try:
            return self._guarded(node, self.others, lambda wire: wire.call(*command, deadline=deadline), deadline)
        except Exception as error:
            self.fail(error)

    def each(
        self, names: Sequence[bytes], commands: Callable[[int], Sequence[Command]], write: bool = False
    ) -> list[list[Reply]]:
        """The replies to each key's commands: one pipeline a server, once more for keys that had moved.

        A key of another type than asked for has None for replies, unless it was to be written.
        """
        replies: list[list[Reply]] = [[] for _ in names]
        deadline = self.deadline()
        todo: Sequence[int] = range(len(names))
        kind = self.writes if write else self.reads
        for last in (False, True):
            moved: list[int] = []

            def talk(wire: Wire, indices: list[int], last: bool = last, moved: list[int] = moved) -> None:
                groups = [commands(index) for index in indices]
                flat = iter(wire.pipeline([command for group in groups for command in group], deadline))
                problem: ReplyError | None = None
                for index, group in zip(indices, groups, strict=True):
                    replies[index] = [next(flat) for _ in group]
                    error = first_error(replies[index])
                    if error and error.code in ("MOVED", "ASK") and not last:
                        moved.append(index)
                    elif error and error.code == "WRONGTYPE" and not write:
                        replies[index] = [None] * len(group)
                    else:
                        problem = problem or error
                if problem:
                    raise problem

            def task(node: Node, indices: list[int], talk: Callable[[Wire, list[int]], None] = talk) -> None:
                self._guarded(node, kind, lambda wire: talk(wire, indices), deadline)

            groups, failures = self._grouped(names, todo, deadline)
            failures += _together([(task, node, indices) for node, indices in groups.items()])
            if failures:
                self.fail(failures[0])
            if not moved:
                break
            todo = moved
            self.servers.moved()
        return replies

    def read(self, names: Sequence[bytes], head: int, allocate: Allocate, max_value: int) -> list[bool | None]:
        """See ``RedisClient.read_headed``. None: lost on the way; whether there is such a value is not known."""
        found: list[bool | None] = [None] * len(names)
        deadline = self.deadline()
        todo: Sequence[int] = range(len(names))
        failures: list[Exception] = []
        size = misses = 0
        allocating = threading.Lock()
        for _ in range(2):
            groups, failed = self._grouped(names, todo, deadline)
            batches = [
                ReadBatch(names, indices, allocate, allocating, head, max_value, self.settings.ttl_seconds)
                for indices in groups.values()
            ]
            tasks = [(self._read, node, batch, deadline) for node, batch in zip(groups, batches, strict=True)]
            failures += failed + _together(tasks)
            todo = []
            for batch in batches:
                for index in batch.done:
                    found[index] = True
                for index in batch.absent:
                    found[index] = False
                size, misses = size + batch.bytes, misses + len(batch.absent)
                todo += batch.moved
            if not todo:
                break
            self.servers.moved()
        self.add(reads=len(names), hits=found.count(True), misses=misses, read_bytes=size)
        blame = next((error for error in failures if isinstance(error, CallerError) or not foreseen(error)), None)
        if blame or (failures and not any(found)):
            self.fail(blame or failures[0])
        for error in failures:
            self.add(**{f"error_{cause_of(error).value}": 1})
        return found

    def _read(self, node: Node, batch: ReadBatch, deadline: float) -> None:
        self._guarded(node, self.reads, lambda wire: batch.run(wire, self.budget, deadline), deadline)

    def judge(self, node: Node, kind: Breaker, error: Exception, heard: float) -> None:
        """Tells the breakers whose fault ``error`` was; ``heard``: when the call began, or the server last sent."""
        cause = cause_of(error)
        link: bool | None = None
        own: bool | None = None
        if isinstance(error, ReplyError):
            link, own = cause is not Cause.CONNECTION, (False if cause is Cause.REFUSED else None)
            if error.code == "READONLY":
                node.forget()
        elif cause is Cause.TIMEOUT:
            # A batch that was too large for its time, from a server that kept sending, says nothing against it.
            link = None if time.monotonic() - heard < self.settings.timeout_ms / 2000 else False
        elif cause in (Cause.CONNECTION, Cause.REFUSED, Cause.PROTOCOL) and foreseen(error):
            link = False
        opened = node.breaker.leave(link)
        opened |= kind.leave(own)
        if link is False:
            self.servers.moved()
        self.add(breaker_opens=int(opened))

    def _guarded(self, node: Node, kind: Breaker, work: Callable[[Wire], T], deadline: float) -> T:
        if self.closed:
            raise RedisUnavailable(Cause.CLOSED, "the client is closed")
        if not node.breaker.enter():
            raise RedisUnavailable(Cause.OPEN_BREAKER, f"{node.name} failed before; it is tried again soon")
        if not kind.enter():
            node.breaker.leave(None)
            raise RedisUnavailable(Cause.OPEN_BREAKER, f"{node.name} refused such calls before; it is tried again soon")
        begun = time.monotonic()
        wire: Wire | None = None
        good = False
        try:
            wire = node.lease(deadline)
            result = work(wire)
            good = True
        except Exception as error:
            good = isinstance(error, ReplyError) and error.code != "READONLY"
            self.judge(node, kind, error, max(begun, wire.heard) if wire else begun)
            raise
        else:
            node.breaker.leave(True)
            kind.leave(True)
            return result
        finally:
            if wire:
                node.give_back(wire, good)

    def _grouped(
        self, names: Sequence[bytes], indices: Sequence[int], deadline: float
    ) -> tuple[dict[Node, list[int]], list[Exception]]:
        groups: dict[Node, list[int]] = {}
        try:
            for index in indices:
                groups.setdefault(self.servers.node_of(names[index], deadline), []).append(index)
        except Exception as error:
            return {}, [error]
        return groups, []


def first_error(replies: Sequence[Reply]) -> ReplyError | None:
    return next((reply for reply in replies if isinstance(reply, ReplyError)), None)


def _together(tasks: Sequence[tuple[Any, ...]]) -> list[Exception]:
    """Runs ``function(*arguments)`` for each at the same time, the first on this thread. What they raised."""
    failures: list[Exception] = []

    def run(function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=task, name="kvcmas-redis", daemon=True) for task in tasks[1:]]
    for thread in threads:
        thread.start()
    if tasks:
        run(*tasks[0])
    for thread in threads:
        thread.join()
    return failures
