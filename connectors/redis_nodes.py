"""Where the keys are: one server, a cluster's nodes, or the master that the sentinels name; and connections to them."""

import os
import threading
import time
from collections.abc import Callable

from redis.connection import AbstractConnection
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError

from lmcache_kvcmas.connectors.redis_connect import connect
from lmcache_kvcmas.connectors.redis_errors import (
    Breaker,
    BusyError,
    Cause,
    ProtocolError,
    RedisUnavailable,
    ReplyError,
)
from lmcache_kvcmas.connectors.redis_settings import Address, RedisSettings
from lmcache_kvcmas.connectors.redis_wire import Wire, dial, left

_SLOTS_LIFE = 60.0
"""Seconds after which a cluster's map of slots is asked for again, changed or not."""


class Node:
    """One server: at most ``connections`` connections, and a breaker. Connects when somebody wants to talk to it."""

    def __init__(
        self,
        name: str,
        make: Callable[[float], AbstractConnection],
        settings: RedisSettings,
        count: Callable[[str], None],
    ) -> None:
        self.name = name
        self.breaker = Breaker(settings.breaker_ms)
        self._make, self._limit, self._count = make, settings.connections, count
        self._free = threading.Condition()
        self._idle: list[Wire] = []
        self._live: set[Wire] = set()
        self._lent = 0
        self._connected = self._closed = False
        self._process = os.getpid()

    def lease(self, deadline: float) -> Wire:
        """A connection; give it back with :meth:`give_back`.

        Raises:
            BusyError: all are in use until the deadline.
        """
        with self._free:
            self._disown()
            while self._lent >= self._limit and not self._closed:
                if not self._free.wait(max(0.0, deadline - time.monotonic())) and self._lent >= self._limit:
                    raise BusyError(f"all {self._limit} connections to {self.name} are in use")
            self._refuse_closed()
            self._lent += 1
        try:
            while True:
                with self._free:
                    wire = self._idle.pop() if self._idle else None
                if wire is None:
                    return self.open(deadline)
                if wire.usable():
                    return wire
                self._drop(wire)
        except BaseException:
            with self._free:
                self._lent -= 1
                self._free.notify()
            raise

    def open(self, deadline: float) -> Wire:
        """A connection beside the others, as long as its user likes: not counted, to be ended by :meth:`end`."""
        wire = dial(self._make, deadline)
        with self._free:
            again, self._connected = self._connected, True
            self._live.add(wire)
            closed = self._closed
        if again and not self._idle and len(self._live) == 1:
            self._count("reconnects")
        if closed:
            self.end(wire)
            self._refuse_closed()
        return wire

    def give_back(self, wire: Wire, good: bool) -> None:
        if not good:
            self._drop(wire)
        with self._free:
            self._lent -= 1
            if good and not self._closed:
                self._idle.append(wire)
            self._free.notify()

    def end(self, wire: Wire) -> None:
        self._drop(wire)

    def forget(self) -> None:
        """Ends the idle connections: the server is not the one that it was."""
        with self._free:
            idle, self._idle = self._idle, []
        for wire in idle:
            self._drop(wire)

    def close(self) -> None:
        """Ends every connection, also under those who wait on it. Does not wait."""
        with self._free:
            self._closed = True
            live, self._live = self._live, set()
            self._idle.clear()
            self._free.notify_all()
        for wire in live:
            wire.shut()

    def _drop(self, wire: Wire) -> None:
        with self._free:
            self._live.discard(wire)
        wire.drop()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RedisUnavailable(Cause.CLOSED, "the client is closed")

    def _disown(self) -> None:
        """In a forked process the parent's connections are the parent's."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._idle, self._live, self._lent = [], set(), 0


class OneServer:
    """All keys on one server; or, with sentinels, on whichever they name when a connection is made."""

    def __init__(self, settings: RedisSettings, count: Callable[[str], None]) -> None:
        self._settings = settings
        name = settings.unix_path or "{}:{}".format(*settings.addresses[0])
        if settings.mode == "sentinel":
            name = f"master {settings.sentinel_master}"
        self._node = Node(name, self._connect, settings, count)

    def node_of(self, key: bytes, deadline: float) -> Node:
        return self._node

    def nodes(self, deadline: float) -> list[Node]:
        return [self._node]

    def known(self) -> list[Node]:
        return [self._node]

    def moved(self) -> None:
        """A key is not where it was thought to be: cannot be, here."""

    def close(self) -> None:
        self._node.close()

    def _connect(self, deadline: float) -> AbstractConnection:
        settings = self._settings
        if settings.unix_path:
            return connect(settings, None, deadline)
        if settings.mode != "sentinel":
            return connect(settings, settings.addresses[0], deadline)
        return connect(settings, self._master(deadline), deadline)

    def _master(self, deadline: float) -> Address:
        """The first sentinel that knows a master. Each may use half of the time that is left, the last all of it."""
        sentinels = self._settings.addresses
        problem: Exception = RedisConnectionError("no sentinel")
        for place, sentinel in enumerate(sentinels):
            until = deadline if place == len(sentinels) - 1 else time.monotonic() + left(deadline) / 2
            try:
                return self._ask(sentinel, until)
            except Exception as error:
                problem = error
        raise problem

    def _ask(self, sentinel: Address, deadline: float) -> Address:
        question = ("SENTINEL", "get-master-addr-by-name", self._settings.sentinel_master)
        for own in (False, True):
            wire = Wire(connect(self._settings, sentinel, deadline, own))
            try:
                answer = wire.call(*question, deadline=deadline)
            except ReplyError as error:
                if error.code == "NOAUTH" and not own:
                    continue
                raise
            finally:
                wire.drop()
            if answer is None:
                raise RedisConnectionError(f"{sentinel.host}:{sentinel.port} knows no {self._settings.sentinel_master}")
            return Address(answer[0].decode(), int(answer[1]))
        raise RedisConnectionError("the sentinel wants another password")


class Cluster:
    """Keys by slot. The map is asked for when there is none, when a key had moved, and once a minute."""

    def __init__(self, settings: RedisSettings, count: Callable[[str], None]) -> None:
        self._settings, self._count = settings, count
        self._lock = threading.Lock()
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Node | None] = []
        self._fresh_until = 0.0
        self._breaker = Breaker(settings.breaker_ms)

    def node_of(self, key: bytes, deadline: float) -> Node:
        self._refresh(deadline)
        node = self._slots[key_slot(key)]
        if node is None:
            raise RedisUnavailable(Cause.CONNECTION, "the cluster has no node for this key")
        return node

    def nodes(self, deadline: float) -> list[Node]:
        self._refresh(deadline)
        return list(dict.fromkeys(node for node in self._slots if node))

    def known(self) -> list[Node]:
        return list(dict.fromkeys(node for node in self._slots if node))

    def moved(self) -> None:
        self._fresh_until = 0.0

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.close()

    def _refresh(self, deadline: float) -> None:
        if time.monotonic() < self._fresh_until:
            return
        if not self._breaker.enter():
            if self._slots:
                return
            raise RedisUnavailable(Cause.OPEN_BREAKER, "no node of the cluster answered")
        try:
            slots = self._ask_all(deadline)
        except Exception as error:
            self._breaker.leave(False)
            if self._slots and not isinstance(error, TimeoutError):
                return
            raise
        self._breaker.leave(True)
        with self._lock:
            self._slots = slots
            self._fresh_until = time.monotonic() + _SLOTS_LIFE

    def _ask_all(self, deadline: float) -> list[Node | None]:
        """The map as told by the first node that answers; those that failed last are asked last."""
        nodes = [self._node(address) for address in (*self._settings.addresses, *self._nodes)]
        nodes = sorted(dict.fromkeys(nodes), key=lambda node: node.breaker.is_open)
        problem: Exception = RedisConnectionError("no node")
        for place, node in enumerate(nodes):
            until = deadline if place == len(nodes) - 1 else time.monotonic() + left(deadline) / 3
            try:
                return self._ask(node, until)
            except Exception as error:
                problem = error
        raise problem

    def _ask(self, node: Node, deadline: float) -> list[Node | None]:
        wire, good = node.lease(deadline), False
        try:
            ranges = wire.call("CLUSTER", "SLOTS", deadline=deadline)
            good = True
        finally:
            node.give_back(wire, good)
        slots: list[Node | None] = [None] * 16384
        asked = node.name.rpartition(":")[0]
        try:
            for first, last, (host, port, *_), *_ in ranges:
                master = self._node(Address(host.decode() if host and host != b"?" else asked, int(port)))
                slots[first : last + 1] = [master] * (last + 1 - first)
        except (TypeError, ValueError) as error:
            raise ProtocolError("CLUSTER SLOTS, which makes no sense") from error
        return slots

    def _node(self, address: Address) -> Node:
        with self._lock:
            node = self._nodes.get(address)
            if node is None:
                node = Node(
                    f"{address.host}:{address.port}",
                    lambda deadline: connect(self._settings, address, deadline),
                    self._settings,
                    self._count,
                )
                self._nodes[address] = node
            return node
