"""Many values in one go, each from its socket straight into the memory that it is meant for.

One connection does it: several at once were not faster, on any size of value, than one whose server has always two
more values to send.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from lmcache_kvcmas.connectors.redis_errors import BusyError, CallerError, ReplyError
from lmcache_kvcmas.connectors.redis_wire import Command, Wire

Allocate = Callable[[int, int, bytes], memoryview | None]
"""``(index, size, head)`` → writable memory of at least ``size`` bytes for what follows the head; None: skip it."""

_AHEAD = 4 << 20
"""Bytes that are asked for before they are needed: enough to hide a round trip, little for the server to hold."""
_DEEPEST = 64
_FALLBACK = {"ERR": "expire", "READONLY": "plain", "NOPERM": "plain"}
"""What a server does not know GETEX by, and what is tried then; a refused EXPIRE costs nothing."""


class Budget:
    """Bytes under way. What is larger than all of it passes alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free = threading.Condition()
        self._taken = 0

    def take(self, size: int, deadline: float) -> None:
        """Raises:
        BusyError: no room until the deadline.
        """
        with self._free:
            while self._taken and self._taken + size > self._most:
                if not self._free.wait(max(0.0, deadline - time.monotonic())):
                    raise BusyError(f"{self._taken} bytes are under way, of at most {self._most}")
            self._taken += size

    def release(self, size: int) -> None:
        with self._free:
            self._taken -= size
            self._free.notify_all()


class ReadBatch:
    """Reads those of ``keys`` (all of one server) that ``indices`` name; ``allocating`` guards ``allocate``."""

    def __init__(
        self,
        keys: Sequence[bytes],
        indices: Sequence[int],
        allocate: Allocate,
        allocating: threading.Lock,
        head: int,
        max_value: int,
        ttl: int,
    ) -> None:
        self._keys, self._allocate, self._allocating = keys, allocate, allocating
        self._head, self._max_value, self._ttl = head, max_value, ttl
        self._todo = deque(indices)
        self.done: list[int] = []
        self.absent: list[int] = []
        """Indices of keys that the server has no value for, or whose value nobody gave memory for. What is in none of
        the lists was lost on the way."""
        self.bytes = 0
        self.moved: list[int] = []
        """Indices of keys that are another server's."""

    def run(self, wire: Wire, budget: Budget, deadline: float) -> None:
        """Reads until nothing is left.

        Raises:
            ReplyError: the server's error to a key that is no miss; the connection stays good.
        """
        asked: deque[int] = deque()
        depth = 8
        while True:
            mode = wire.read_mode or ("getex" if self._ttl else "plain")
            if len(asked) <= depth // 2:
                wire.send(self._next(asked, depth, mode), deadline)
            if not asked:
                return
            index = asked.popleft()
            try:
                size = wire.begin_bulk(deadline)
            except ReplyError as error:
                self._second(wire, mode, deadline)
                known = self._judge(wire, index, error, mode)
                if not known or (wire.read_mode or mode) != mode:
                    self._drain(wire, asked, mode, deadline)
                if not known:
                    raise
                continue
            if size is None:
                self.absent.append(index)
            else:
                depth = max(2, min(_DEEPEST, _AHEAD // (size + 1)))
                self._value(wire, index, size, budget, deadline)
            self._second(wire, mode, deadline)

    def _next(self, asked: deque[int], depth: int, mode: str) -> list[Command]:
        commands: list[Command] = []
        while self._todo and len(asked) < depth:
            index = self._todo.popleft()
            asked.append(index)
            key = self._keys[index]
            commands.append(("GETEX", key, "EX", self._ttl) if mode == "getex" else ("GET", key))
            if mode == "expire":
                commands.append(("EXPIRE", key, self._ttl))
        return commands

    def _value(self, wire: Wire, index: int, size: int, budget: Budget, deadline: float) -> None:
        target = None
        whole = size
        if size <= self._max_value:
            head = bytearray(min(self._head, size))
            wire.take(memoryview(head), deadline)
            size -= len(head)
            budget.take(size, deadline)
            try:
                target = self._memory(index, size, bytes(head))
                wire.heard = time.monotonic()  # what the caller took is not the server's
                if target is not None:
                    wire.take(target, deadline)
            finally:
                budget.release(size)
        if target is None:
            wire.skip(size, deadline)
        wire.end_bulk(deadline)
        if target is None:
            self.absent.append(index)
        else:
            self.done.append(index)
            self.bytes += whole

    def _memory(self, index: int, size: int, head: bytes) -> memoryview | None:
        try:
            with self._allocating:
                target = self._allocate(index, size, head)
            if target is not None and target.nbytes < size:
                raise ValueError(f"{target.nbytes} bytes of memory for a value of {size}")
            return target.cast("B")[:size] if target is not None and target.nbytes else target
        except Exception as error:
            raise CallerError from error

    def _second(self, wire: Wire, mode: str, deadline: float) -> None:
        if mode == "expire":
            try:
                wire.reply(deadline)
            except ReplyError as error:
                if error.code in ("READONLY", "NOPERM"):
                    wire.read_mode = "plain"

    def _judge(self, wire: Wire, index: int, error: ReplyError, mode: str) -> bool:
        """Whether reading goes on after an error."""
        if error.code in ("MOVED", "ASK"):
            self.moved.append(index)
        elif error.code == "WRONGTYPE":
            self.absent.append(index)
        elif mode == "getex" and error.code in _FALLBACK:
            wire.read_mode = _FALLBACK[error.code]
            self._todo.appendleft(index)
        else:
            return False
        return True

    def _drain(self, wire: Wire, asked: deque[int], mode: str, deadline: float) -> None:
        """Reads past what was asked for in a way that this server does not answer; it will be asked again."""
        for _ in asked:
            try:
                size = wire.begin_bulk(deadline)
                if size is not None:
                    wire.skip(size, deadline)
                    wire.end_bulk(deadline)
            except ReplyError:
                pass
            self._second(wire, mode, deadline)
        self._todo.extendleft(reversed(asked))
        asked.clear()
