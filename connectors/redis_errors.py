"""Why Redis did not answer, and the breaker that keeps such calls from costing anything."""

import threading
import time
from enum import Enum

from redis.backoff import EqualJitterBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from lmcache_kvcmas.connectors.redis_settings import BREAKER_MAX_MS
from lmcache_kvcmas.errors import KVCMASError

_REFUSALS = {"OOM", "READONLY", "NOPERM", "NOAUTH", "WRONGPASS", "MISCONF", "NOREPLICAS", "MASTERDOWN"}
_DOWN = {"LOADING", "CLUSTERDOWN", "BUSY", "TRYAGAIN"}


class Cause(Enum):
    OPEN_BREAKER = "open_breaker"
    """It failed shortly before; nothing was sent."""
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    """Not reachable, went away, loading its data, or its certificate is not trusted."""
    REFUSED = "refused"
    """It answers, but not to us: password, ACL, read-only, out of memory."""
    PROTOCOL = "protocol"
    """An answer that makes no sense here."""
    BUSY = "busy"
    """All connections, or all bytes under way, were in use until the deadline. The server is not to blame."""
    CLOSED = "closed"


class RedisUnavailable(KVCMASError):  # noqa: N818 - a state, not a mistake
    """Redis did not do it. What a batch had done before may have been done."""

    def __init__(self, cause: Cause, text: str) -> None:
        super().__init__(f"Redis is unavailable ({cause.value}): {text}")
        self.cause = cause


class ReplyError(Exception):
    """The server's error to one command."""

    def __init__(self, text: str) -> None:
        super().__init__(text[:200])
        self.code = text.partition(" ")[0]

    @property
    def cause(self) -> Cause:
        return Cause.REFUSED if self.code in _REFUSALS else Cause.CONNECTION if self.code in _DOWN else Cause.PROTOCOL


class ProtocolError(Exception):
    """Bytes that are no reply, or one beyond all bounds. The connection cannot be used any more."""


class BusyError(Exception):
    """No connection, or no room for more bytes, until the deadline."""


class CallerError(Exception):
    """What a function of the caller's raised; its cause is handed back to the caller."""


def foreseen(error: Exception) -> bool:
    """Whether it is one of the things that a server or a network does."""
    return isinstance(error, OSError | RedisError | ReplyError | ProtocolError | BusyError | RedisUnavailable)


def cause_of(error: Exception) -> Cause:
    """The cause of whatever a call raised."""
    if isinstance(error, RedisUnavailable | ReplyError):
        return error.cause
    if isinstance(error, BusyError):
        return Cause.BUSY
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return Cause.TIMEOUT
    if isinstance(error, AuthenticationError | ResponseError):
        return Cause.REFUSED
    return Cause.PROTOCOL if isinstance(error, ProtocolError) else Cause.CONNECTION


class Breaker:
    """Closed until something fails; then nobody passes until the pause is over, then one, whose outcome decides.

    The pauses double from ``first_ms`` to 5 s, each shortened by a random part of up to a half.
    """

    def __init__(self, first_ms: int) -> None:
        self._backoff = EqualJitterBackoff(cap=BREAKER_MAX_MS / 1000, base=first_ms / 1000)
        self._lock = threading.Lock()
        self._failures = 0
        self._again = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._failures > 0

    def enter(self) -> bool:
        """Whether the caller may go on; one that may must say how it went: :meth:`leave`."""
        if not self._failures:
            return True
        with self._lock:
            if self._failures and (self._probing or time.monotonic() < self._again):
                return False
            self._probing = self._failures > 0
            return True

    def leave(self, ok: bool | None) -> bool:
        """``None``: nothing was learned about the server. True if this opened the breaker."""
        with self._lock:
            probed, self._probing = self._probing, False
            if ok:
                self._failures = 0
            elif ok is False and (probed or not self._failures):
                self._again = time.monotonic() + self._backoff.compute(min(self._failures, 16))
                self._failures += 1
                return self._failures == 1
            return False
