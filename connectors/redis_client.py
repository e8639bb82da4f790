"""The Redis client of the tier: batches with one deadline, breakers, and no exception but one.

redis-py connects, authenticates and encrypts; ``redis_wire`` reads and writes. redis-py's own retries stay unused: a
batch has one deadline, and what tries again is the breaker's probe.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from lmcache_kvcmas.connectors.redis_calls import RedisCalls, first_error
from lmcache_kvcmas.connectors.redis_errors import BusyError, Cause, RedisUnavailable, ReplyError
from lmcache_kvcmas.connectors.redis_nodes import Node
from lmcache_kvcmas.connectors.redis_reads import Allocate
from lmcache_kvcmas.connectors.redis_settings import RedisSettings
from lmcache_kvcmas.connectors.redis_wire import MAX_BULK, Buffer, Command, Part, Reply, Wire

__all__ = ["Cause", "RedisClient", "RedisUnavailable"]

Key = bytes | str
Entries = list[tuple[str, dict[bytes, bytes]]]

_SUMMED = {
    *("used_memory", "maxmemory", "connected_clients", "evicted_keys", "expired_keys"),
    *("keyspace_hits", "keyspace_misses", "keys"),
}


class RedisClient:
    """Thread-safe and synchronous; connects when it is first used. Not for use over a fork.

    Every call may raise :class:`RedisUnavailable`, after ``timeout_ms`` at the latest, and nothing else. After a failed
    call others fail at once, until the server has been probed and found well. Refusals stop only their own kind:
    a server that is full is still read from.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self._calls = RedisCalls(settings)
        self.stats: Counter[str] = self._calls.stats
        """``reads, read_bytes, hits, misses, writes, written_bytes, reconnects, breaker_opens, error_CAUSE``."""
        self._tails: dict[bytes, tuple[Node, Wire]] = {}

    # --- values ---

    def read_into(
        self, keys: Sequence[Key], allocate: Callable[[int, int], memoryview | None], max_value: int = MAX_BULK
    ) -> list[bool]:
        """Copies each value into the memory that ``allocate(index, size)`` gives; None skips it. Renews the TTLs.

        ``allocate`` is called in any order, by one thread at a time, also for values that then do not come whole.
        False: absent, skipped, larger than ``max_value``, or lost on the way (its memory holds anything).
        Raises only if nothing came at all and something failed.
        """
        return self.read_headed(keys, 0, lambda index, size, head: allocate(index, size), max_value)

    def read_headed(self, keys: Sequence[Key], head: int, allocate: Allocate, max_value: int = MAX_BULK) -> list[bool]:
        """As :meth:`read_into`, but ``allocate(index, size, head)`` sees the first ``head`` bytes of the value.

        The memory it gives is for the ``size`` bytes after them. A value shorter than that is all head.
        """
        return [came is True for came in self._calls.read([_key(key) for key in keys], head, allocate, max_value)]

    def read_known(self, keys: Sequence[Key], allocate: Callable[[int, int], memoryview | None]) -> list[bool | None]:
        """As :meth:`read_into`, but what was lost on the way is None: it may well be there."""
        names = [_key(key) for key in keys]
        return self._calls.read(names, 0, lambda index, size, head: allocate(index, size), MAX_BULK)

    def get_many(self, keys: Sequence[Key], max_value: int = MAX_BULK) -> list[bytes | memoryview | None]:
        """Values, in order; None: absent, larger than ``max_value``, or beyond ``max_inflight_bytes`` in all."""
        values: list[bytes | memoryview | None] = [None] * len(keys)
        room = self.settings.max_inflight_bytes

        def allocate(index: int, size: int) -> memoryview | None:
            nonlocal room
            if size > room:
                return None
            room -= size
            value = memoryview(bytearray(size))
            values[index] = value
            return value

        found = self.read_into(keys, allocate, max_value)
        return [value if here else None for value, here in zip(values, found, strict=True)]

    def put_many(self, items: Sequence[tuple[Key, Buffer | tuple[Buffer, ...]]]) -> None:
        """Stores all of them, each for ``ttl_seconds``. If it raises, any part of them may be stored.

        A tuple is one value in pieces. Nothing is copied.
        """
        names = [_key(key) for key, _ in items]
        values = [value if isinstance(value, tuple) else (value,) for _, value in items]
        ttl: tuple[Part, ...] = ("EX", self.settings.ttl_seconds) if self.settings.ttl_seconds else ()
        total = sum(memoryview(piece).nbytes for value in values for piece in value)
        calls = self._calls
        try:
            calls.budget.take(total, calls.deadline())
        except BusyError as error:
            calls.fail(error)
        try:
            calls.each(names, lambda index: [("SET", names[index], values[index], *ttl)], write=True)
        finally:
            calls.budget.release(total)
        calls.add(writes=len(items), written_bytes=total)

    def remove_many(self, keys: Sequence[Key]) -> int:
        """How many there were."""
        names = [_key(key) for key in keys]
        return sum(_int(reply) for [reply] in self._calls.each(names, lambda i: [("UNLINK", names[i])], write=True))

    def exists_many(self, keys: Sequence[Key]) -> list[bool]:
        names = [_key(key) for key in keys]
        return [bool(_int(reply)) for [reply] in self._calls.each(names, lambda i: [("EXISTS", names[i])])]

    def sizes(self, keys: Sequence[Key]) -> list[int | None]:
        """Bytes of each value; None if it is absent, or empty."""
        names = [_key(key) for key in keys]
        return [_int(reply) or None for [reply] in self._calls.each(names, lambda i: [("STRLEN", names[i])])]

    def head_many(self, keys: Sequence[Key], n: int) -> list[bytes]:
        """The first ``n`` bytes of each value; empty if it is absent."""
        return [head for head, _ in self.peek_many(keys, n)]

    def peek_many(self, keys: Sequence[Key], n: int) -> list[tuple[bytes, int]]:
        """The first ``n`` bytes of each value and its whole size."""
        names = [_key(key) for key in keys]
        asked = self._calls.each(names, lambda i: [("GETRANGE", names[i], 0, n - 1), ("STRLEN", names[i])])
        return [(_bytes(head), _int(size)) for head, size in asked]

    def ttl_many(self, keys: Sequence[Key]) -> list[int | None]:
        """Seconds left of each key, -1: for ever; None if it is absent."""
        names = [_key(key) for key in keys]
        seconds = [_int(reply) for [reply] in self._calls.each(names, lambda i: [("TTL", names[i])])]
        return [None if left == -2 else left for left in seconds]

    # --- a sorted set as a bounded set that several may add to ---

    def set_add(self, key: Key, member: bytes, score: float, keep: int) -> list[bytes]:
        """Adds a member, or raises its score; only the ``keep`` highest stay. The members that went."""
        name = _key(key)
        commands: list[Command] = [
            ("MULTI",),
            ("ZADD", name, "GT", score, member),
            ("ZRANGE", name, 0, -(keep + 1)),
            ("ZREMRANGEBYRANK", name, 0, -(keep + 1)),
            *self._expire(name),
            ("EXEC",),
        ]
        answer = self._one(name, commands, write=True)[-1]
        error = first_error(_list(answer))
        if error:
            self._calls.fail(error)
        return [_bytes(gone) for gone in _list(answer[1])]

    def set_members(self, key: Key) -> list[tuple[bytes, float]]:
        """Members and scores, highest first."""
        [flat] = self._one(_key(key), [("ZREVRANGE", _key(key), 0, -1, "WITHSCORES")])
        return [(member, float(score)) for member, score in _pairs(flat)]

    def set_touch(self, key: Key, members: Mapping[bytes, float]) -> None:
        """Raises the scores of members that are there; does not add any."""
        if members:
            pairs: list[Part] = [part for member, score in members.items() for part in (score, member)]
            self._one(_key(key), [("ZADD", _key(key), "XX", "GT", *pairs), *self._expire(_key(key))], write=True)

    def set_remove(self, key: Key, members: Sequence[bytes]) -> None:
        if members:
            self._one(_key(key), [("ZREM", _key(key), *members)], write=True)

    # --- streams ---

    def append(self, stream: Key, fields: Mapping[bytes | str, bytes | str | int], keep: int) -> str:
        """Appends an entry; about ``keep`` of them stay. Its id."""
        flat: list[Part] = [part for pair in fields.items() for part in pair]
        name = _key(stream)
        add: Command = ("XADD", name, "MAXLEN", "~", keep, "*", *flat)
        return _bytes(self._one(name, [add, *self._expire(name)], write=True)[0]).decode()

    def latest(self, stream: Key, count: int) -> Entries:
        """The newest entries, newest first."""
        [entries] = self._one(_key(stream), [("XREVRANGE", _key(stream), "+", "-", "COUNT", count)])
        return _entries(entries)

    def tail(self, stream: Key, after: str | None, count: int, block_ms: int) -> Entries:
        """Entries after an id (None: from the oldest), waiting ``block_ms`` for the first. On a connection of its own.

        Takes up to ``block_ms`` + ``timeout_ms``. One thread at a time for each stream.
        """
        calls, name = self._calls, _key(stream)
        try:
            node = calls.servers.node_of(name, calls.deadline())
        except Exception as error:
            calls.fail(error)
        if node.breaker.is_open:
            # A probe must not take as long as a wait for news.
            calls.on(node, ("PING",))
        waiting: Command = ("BLOCK", block_ms) if block_ms > 0 else ()
        command: Command = ("XREAD", "COUNT", count, *waiting, "STREAMS", name, after or "0-0")
        kept = self._tails.pop(name, None)
        wire: Wire | None = None
        if kept and kept[0] is node and kept[1].usable():
            wire = kept[1]
        elif kept:
            kept[0].end(kept[1])
        begun = time.monotonic()
        try:
            wire = wire or node.open(calls.deadline())
            answer = wire.call(*command, deadline=begun + (block_ms + self.settings.timeout_ms) / 1000)
            entries = _entries(answer[0][1]) if answer else []
        except Exception as error:
            if wire:
                node.end(wire)
            if isinstance(error, ReplyError) and error.code in ("MOVED", "ASK"):
                calls.servers.moved()
            calls.judge(node, calls.reads, error, begun)
            calls.fail(error)
        self._tails[name] = (node, wire)
        return entries

    # --- hashes ---

    def hash_set(self, key: Key, field: Key, value: Buffer) -> None:
        self._one(_key(key), [("HSET", _key(key), field, value), *self._expire(_key(key))], write=True)

    def hash_all(self, key: Key) -> dict[bytes, bytes]:
        [flat] = self._one(_key(key), [("HGETALL", _key(key))])
        return dict(_pairs(flat))

    def hash_remove(self, key: Key, fields: Sequence[Key]) -> int:
        """How many there were."""
        return _int(self._one(_key(key), [("HDEL", _key(key), *fields)], write=True)[0]) if fields else 0

    # --- servers ---

    def scan(self, pattern: Key, count: int = 1000) -> Iterator[bytes]:
        """Keys of all servers that match; each page has a deadline of its own. May tell a key twice, as SCAN does."""
        for node in self._calls.nodes():
            cursor: Reply = b"0"
            while True:
                answer = _list(self._calls.on(node, ("SCAN", cursor, "MATCH", pattern, "COUNT", count)))
                cursor, keys = answer
                yield from _list(keys)
                if cursor == b"0":
                    break

    def info(self) -> dict[str, int | str]:
        """Of INFO: counts and sizes added up over all servers, all else as the first one says; and ``nodes``."""
        nodes = self._calls.nodes()
        told: dict[str, int | str] = {"nodes": len(nodes), "keys": 0}
        for place, node in enumerate(nodes):
            for line in _bytes(self._calls.on(node, ("INFO",))).decode(errors="replace").splitlines():
                name, colon, value = line.partition(":")
                if not colon or name.startswith("#"):
                    continue
                if name.startswith("db") and value.startswith("keys="):
                    name, value = "keys", value[5:].partition(",")[0]
                if name in _SUMMED and value.isdigit():
                    told[name] = int(told.get(name, 0)) + int(value)
                elif not place:
                    told[name] = int(value) if value.isdigit() else value
        return told

    def ping(self) -> float:
        """Seconds of a round trip to the slowest server."""
        slowest = 0.0
        for node in self._calls.nodes():
            begun = time.monotonic()
            self._calls.on(node, ("PING",))
            slowest = max(slowest, time.monotonic() - begun)
        return slowest

    def clocks(self) -> list[float]:
        """Seconds since 1970, by each server's clock."""
        told = [_list(self._calls.on(node, ("TIME",))) for node in self._calls.nodes()]
        return [int(_bytes(seconds)) + int(_bytes(micros)) / 1e6 for seconds, micros in told]

    @property
    def state(self) -> str:
        """``up``, or ``down`` while no server answers; ``up`` until one was tried."""
        nodes = self._calls.servers.known()
        return "down" if self._calls.closed or (nodes and all(node.breaker.is_open for node in nodes)) else "up"

    def close(self) -> None:
        """Ends at once; calls under way in other threads fail."""
        self._calls.closed = True
        self._calls.servers.close()

    def _one(self, name: bytes, commands: Sequence[Command], write: bool = False) -> list[Reply]:
        return self._calls.each([name], lambda _: commands, write)[0]

    def _expire(self, name: bytes) -> list[Command]:
        return [("EXPIRE", name, self.settings.ttl_seconds)] if self.settings.ttl_seconds else []


def _key(key: Key) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key)


def _int(reply: Reply) -> int:
    if reply is None:
        return 0
    if not isinstance(reply, int):
        raise RedisUnavailable(Cause.PROTOCOL, f"{reply!r:.60}, where a number should be")
    return reply


def _bytes(reply: Reply) -> bytes:
    if reply is None:
        return b""
    if not isinstance(reply, bytes):
        raise RedisUnavailable(Cause.PROTOCOL, f"{reply!r:.60}, where a text should be")
    return reply


def _list(reply: Reply) -> list[Reply]:
    if reply is None:
        return []
    if not isinstance(reply, list):
        raise RedisUnavailable(Cause.PROTOCOL, f"{reply!r:.60}, where a list should be")
    return reply


def _pairs(reply: Reply) -> Iterator[tuple[bytes, bytes]]:
    flat = _list(reply)
    return ((_bytes(flat[at]), _bytes(flat[at + 1])) for at in range(0, len(flat) - 1, 2))


def _entries(reply: Reply) -> Entries:
    # An entry that was deleted under a reader has no fields.
    return [(_bytes(name).decode(), dict(_pairs(fields))) for name, fields in _list(reply) if fields]
