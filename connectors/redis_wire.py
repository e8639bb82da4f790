"""Commands and replies (RESP2) on a connection that redis-py has made: connected, authenticated, encrypted.

redis-py's own pipelines read a value into an object of their own, and wait for each packet as long as for the batch.
Here a value goes from the socket into the memory that it is meant for, and every wait ends at one deadline.
"""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.connection import AbstractConnection

from lmcache_kvcmas.connectors.redis_errors import ProtocolError, ReplyError

Buffer = bytes | bytearray | memoryview
Part = Buffer | str | int | float | tuple[Buffer, ...]
"""A tuple is one value in pieces, which need not lie side by side."""
Command = Sequence[Part]
Reply = Any
"""bytes (text and bulk alike), int, None, a list of replies, or a ReplyError (inside pipelines and lists)."""

MAX_BULK = 512 << 20
_INLINE = 1 << 14
"""Parts below this size are joined before they are sent."""
_BUFFER = 1 << 16


def left(deadline: float) -> float:
    """Seconds until ``deadline`` (of ``time.monotonic``).

    Raises:
        TimeoutError: it has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the deadline has passed")
    return seconds


class Wire:
    """One connection, one user at a time. After any exception but :class:`ReplyError` it must be dropped."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        sock: Any = connection._get_socket()
        if sock is None:
            raise ConnectionError("not connected")
        self._sock: socket.socket = sock
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self.heard = time.monotonic()
        """When the server last sent anything."""
        self.read_mode = ""
        """How this server wants to be read from; learned on the way."""

    def usable(self) -> bool:
        """Whether an idle connection is still there; one that has something to say was closed, or is out of step."""
        if self._end > self._start:
            return False
        try:
            self._sock.settimeout(0)
            self._sock.recv(1)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def shut(self) -> None:
        """Wakes up whoever waits on it; may be called from any thread."""
        with contextlib.suppress(OSError, ValueError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        with contextlib.suppress(Exception):
            self._connection.disconnect()  # type: ignore[no-untyped-call]

    # --- sending ---

    def send(self, commands: Iterable[Command], deadline: float) -> None:
        """Sends them all; big parts go out of the caller's memory, uncopied."""
        pending = bytearray()
        for command in commands:
            pending += b"*%d\r\n" % len(command)
            for part in command:
                pieces = [_encoded(piece) for piece in (part if isinstance(part, tuple) else (part,))]
                pending += b"$%d\r\n" % sum(piece.nbytes for piece in pieces)
                for piece in pieces:
                    if piece.nbytes < _INLINE:
                        pending += piece
                    else:
                        self._write(pending, deadline)
                        self._write(piece, deadline)
                        pending = bytearray()
                pending += b"\r\n"
        self._write(pending, deadline)

    def _write(self, data: Buffer, deadline: float) -> None:
        view = memoryview(data).cast("B")
        while view.nbytes:
            self._sock.settimeout(left(deadline))
            view = view[self._sock.send(view) :]

    # --- receiving ---

    def reply(self, deadline: float, max_bulk: int = MAX_BULK) -> Reply:
        """The next reply.

        Raises:
            ReplyError: it is an error.
        """
        kind, line = self._line(deadline)
        if kind == b"+":
            return line
        if kind == b"-":
            raise ReplyError(line.decode(errors="replace"))
        if kind == b":":
            return _number(line)
        if kind == b"$":
            size = _number(line)
            if size < 0:
                return None
            if size > max_bulk:
                raise ProtocolError(f"a reply of {size} bytes, where {max_bulk} are the most")
            value = bytearray(size)
            self.take(memoryview(value), deadline)
            self.end_bulk(deadline)
            return bytes(value)
        if kind == b"*":
            count = _number(line)
            if count > 1 << 22:
                raise ProtocolError(f"a reply of {count} parts")
            return None if count < 0 else [self._item(deadline, max_bulk) for _ in range(count)]
        raise ProtocolError(f"a reply that begins with {kind!r}")

    def _item(self, deadline: float, max_bulk: int) -> Reply:
        try:
            return self.reply(deadline, max_bulk)
        except ReplyError as error:
            return error

    def pipeline(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """One round trip; errors stand in the list."""
        self.send(commands, deadline)
        return [self._item(deadline, MAX_BULK) for _ in commands]

    def call(self, *command: Part, deadline: float) -> Reply:
        self.send([command], deadline)
        return self.reply(deadline)

    def begin_bulk(self, deadline: float) -> int | None:
        """The size of the value that comes next; None if there is none.

        Raises:
            ReplyError: the reply is an error.
        """
        kind, line = self._line(deadline)
        if kind == b"-":
            raise ReplyError(line.decode(errors="replace"))
        if kind != b"$":
            raise ProtocolError(f"a reply that begins with {kind!r}, where a value should be")
        size = _number(line)
        return size if size >= 0 else None

    def take(self, target: memoryview, deadline: float) -> None:
        """The next ``target.nbytes`` bytes of a value."""
        have = min(self._end - self._start, target.nbytes)
        if have:
            target[:have] = self._view[self._start : self._start + have]
            self._start += have
        while have < target.nbytes:
            have += self._receive(target[have:], deadline)

    def skip(self, size: int, deadline: float) -> None:
        """Reads past ``size`` bytes of a value."""
        have = min(self._end - self._start, size)
        self._start += have
        size -= have
        while size:
            size -= self._receive(self._view[: min(size, _BUFFER)], deadline)
            self._start = self._end = 0

    def end_bulk(self, deadline: float) -> None:
        while self._end - self._start < 2:
            self._fill(deadline)
        if self._buffer[self._start : self._start + 2] != b"\r\n":
            raise ProtocolError("a value that is longer than it said")
        self._start += 2

    def _line(self, deadline: float) -> tuple[bytes, bytes]:
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._fill(deadline)
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line[:1], line[1:]

    def _fill(self, deadline: float) -> None:
        if self._start:
            rest = self._end - self._start
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        if self._end == _BUFFER:
            raise ProtocolError("a line that does not end")
        self._end += self._receive(self._view[self._end :], deadline)

    def _receive(self, target: memoryview, deadline: float) -> int:
        self._sock.settimeout(left(deadline))
        size = self._sock.recv_into(target)
        if not size:
            raise ConnectionError("the server closed the connection")
        self.heard = time.monotonic()
        return size


def dial(make: Callable[[float], AbstractConnection], deadline: float) -> Wire:
    """A connection made by ``make(deadline)``, on a thread of its own: looking up a name has no time-out.

    Raises:
        TimeoutError: it was not there by the deadline; if it comes later, it is closed.
    """
    lock = threading.Lock()
    done = threading.Event()
    made: list[AbstractConnection | Exception] = []
    late = False

    def connect() -> None:
        outcome: AbstractConnection | Exception
        try:
            outcome = make(deadline)
        except Exception as error:
            outcome = error
        with lock:
            made.append(outcome)
            unwanted = late
        done.set()
        if unwanted and isinstance(outcome, AbstractConnection):
            outcome.disconnect()  # type: ignore[no-untyped-call]

    threading.Thread(target=connect, name="kvcmas-redis-connect", daemon=True).start()
    done.wait(max(0.0, deadline - time.monotonic()))
    with lock:
        if not made:
            late = True
            raise TimeoutError("no connection by the deadline")
    if isinstance(made[0], Exception):
        raise made[0]
    return Wire(made[0])


def _encoded(part: Buffer | str | int | float) -> memoryview:
    if isinstance(part, bytes | bytearray | memoryview):
        view = memoryview(part)
        return view.cast("B") if view.nbytes else memoryview(b"")
    return memoryview((repr(part) if isinstance(part, float) else str(part)).encode())


def _number(line: bytes) -> int:
    try:
        if len(line) > 20:
            raise ValueError
        return int(line)
    except ValueError:
        raise ProtocolError(f"{line[:40]!r}, where a number should be") from None
