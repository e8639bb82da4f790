"""The client against real servers: what it reads and writes, and what every fault costs whoever serves meanwhile."""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis_server import Certificates, RedisServer, Servers, wait_until

from lmcache_kvcmas.connectors.redis_client import Cause, RedisClient, RedisUnavailable

OpenClient = Callable[..., RedisClient]
MIB = 1 << 20
MS = 400
"""Time-out of the clients that are to fail."""
MARGIN = 0.5
"""Seconds that a busy two-core machine may add to a time-out."""


def filled(size: int, value: int) -> bytes:
    return bytes([value]) * size


def fails(call: Callable[[], object], *causes: Cause, within: float = MS / 1000 + MARGIN) -> float:
    """Seconds until it failed with one of the causes."""
    begun = time.monotonic()
    with pytest.raises(RedisUnavailable) as caught:
        call()
    seconds = time.monotonic() - begun
    assert caught.value.cause in causes, caught.value
    assert seconds < within, f"{seconds:.3f} s until it failed"
    return seconds


def fails_at_once(call: Callable[[], object]) -> None:
    """The fastest of some calls: the machine may have paused one."""
    assert min(fails(call, Cause.OPEN_BREAKER) for _ in range(5)) < 0.001


def closes_at_once(client: RedisClient) -> None:
    begun = time.monotonic()
    client.close()
    assert time.monotonic() - begun < 1
    fails(lambda: client.get_many(["a"]), Cause.CLOSED)


def back_within_10_s(client: RedisClient) -> None:
    def answers() -> bool:
        try:
            client.get_many(["a"])
        except RedisUnavailable:
            return False
        return True

    wait_until(answers, 10)
    assert client.state == "up"


def into(memory: dict[int, bytearray]) -> Callable[[int, int], memoryview]:
    def allocate(index: int, size: int) -> memoryview:
        memory[index] = bytearray(size)
        return memoryview(memory[index])

    return allocate


# --- values ---


def test_values_of_all_sizes_come_back_in_order(shared_server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(shared_server)
    sizes = [0, 1, 5, 16_383, 16_384, 65_535, 65_536, 65_537, 3 * MIB + 1, *range(100, 400)]
    values = {f"{{v}}:{place}": filled(size, place % 251) for place, size in enumerate(sizes)}
    client.put_many([(key, memoryview(value)) for key, value in values.items()])
    keys = [*values, "{v}:absent"]
    assert [value if value is None else bytes(value) for value in client.get_many(keys)] == [*values.values(), None]
    memory: dict[int, bytearray] = {}
    assert client.read_into(keys, into(memory)) == [True] * len(values) + [False]
    assert [bytes(memory[place]) for place in range(len(values))] == list(values.values())
    assert client.exists_many(keys) == [True] * len(values) + [False]
    assert client.sizes(keys) == [size or None for size in sizes] + [None]
    assert client.head_many(keys[-3:], 7) == [filled(7, (len(sizes) - 2) % 251), filled(7, (len(sizes) - 1) % 251), b""]
    assert all(600_000 < (seconds or 0) <= 604_800 for seconds in client.ttl_many(keys[:-1]))
    assert client.ttl_many(keys[-1:]) == [None]
    assert client.remove_many(keys) == len(values)
    assert client.stats["hits"] == 2 * len(values)
    assert client.stats["misses"] == 2
    assert client.stats["written_bytes"] == client.stats["read_bytes"] / 2 == sum(sizes)


def test_a_value_that_is_too_large_or_unwanted_is_read_past(
    shared_server: RedisServer, open_client: OpenClient
) -> None:
    client = open_client(shared_server)
    client.put_many([("p:0", filled(10, 1)), ("p:1", filled(5 * MIB, 2)), ("p:2", filled(10, 3)), ("p:3", b"last")])
    asked: list[int] = []

    def allocate(index: int, size: int) -> memoryview | None:
        asked.append(index)
        return None if index == 2 else memoryview(bytearray(size))

    assert client.read_into(["p:0", "p:1", "p:2", "p:3"], allocate, max_value=MIB) == [True, False, False, True]
    assert asked == [0, 2, 3], "memory was asked for a value beyond max_value"
    assert client.get_many(["p:3"]) == [b"last"], "the connection was left out of step"


def test_a_head_is_seen_before_memory_is_given(shared_server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(shared_server)
    client.put_many([("h:0", b"headtail"), ("h:1", b"hea")])
    seen: list[tuple[int, int, bytes]] = []
    tail = bytearray(4)

    def allocate(index: int, size: int, head: bytes) -> memoryview | None:
        seen.append((index, size, head))
        return memoryview(tail) if size else None

    assert client.read_headed(["h:0", "h:1"], 4, allocate) == [True, False]
    assert (seen, bytes(tail)) == ([(0, 4, b"head"), (1, 0, b"hea")], b"tail")


def test_what_the_caller_s_function_raises_reaches_the_caller(
    shared_server: RedisServer, open_client: OpenClient
) -> None:
    client = open_client(shared_server)
    client.put_many([("c", b"value")])

    def broken(index: int, size: int) -> memoryview:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        client.read_into(["c"], broken)
    assert client.state == "up"
    assert client.get_many(["c"]) == [b"value"]


def test_reading_renews_the_ttl_on_old_servers_too(shared_server: RedisServer, open_client: OpenClient) -> None:
    writer, reader = open_client(shared_server, ttl_seconds=50), open_client(shared_server, ttl_seconds=9000)
    keys = [f"t:{n}" for n in range(20)]
    writer.put_many([(key, b"x") for key in keys])
    assert reader.get_many(keys) == [b"x"] * 20
    assert all((seconds or 0) > 8000 for seconds in reader.ttl_many(keys))
    # A server before 6.2 does not know the command.
    old = open_client(f"redis://old:p@127.0.0.1:{shared_server.port}", ttl_seconds=99_999)
    shared_server.cli("ACL", "SETUSER", "old", "on", ">p", "~*", "+@all", "-getex")
    assert old.get_many(keys) == [b"x"] * 20, "without GETEX nothing is read"
    forever = open_client(shared_server, ttl_seconds=0)
    forever.put_many([("t:for ever", b"x")])
    assert forever.get_many(["t:for ever"]) == [b"x"]
    assert forever.ttl_many(["t:for ever"]) == [-1]


def test_a_key_of_another_type_is_a_miss(shared_server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(shared_server)
    client.hash_set("w:hash", "f", b"v")
    client.put_many([("w:value", b"v")])
    assert client.get_many(["w:hash", "w:value"]) == [None, b"v"]
    assert client.sizes(["w:hash", "w:value"]) == [None, 1]
    assert client.set_members("w:hash") == []
    assert client.state == "up"


def test_bytes_under_way_are_bounded(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server, timeout_ms=600, max_inflight_bytes=MIB)
    client.put_many([("b:large", filled(4 * MIB, 1)), ("b", filled(MIB, 1))])  # too large for others, alone it passes
    assert client.get_many(["b:large"]) == [None], "more than max_inflight_bytes was taken into memory"
    taken, go_on = threading.Event(), threading.Event()

    def allocate(index: int, size: int) -> memoryview:
        taken.set()
        go_on.wait(10)
        return memoryview(bytearray(size))

    reader = threading.Thread(target=lambda: fails(lambda: client.read_into(["b"], allocate), Cause.TIMEOUT, within=5))
    reader.start()
    taken.wait(10)
    fails(lambda: client.put_many([("c", b"1")]), Cause.BUSY, within=0.6 + MARGIN)
    go_on.set()
    reader.join()
    assert client.stats["error_timeout"] == 1
    assert client.state == "up", "the server was blamed for the time that the caller took"
    client.put_many([("c", b"1")])


def test_many_threads_share_few_connections(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server, connections=2)
    client.put_many([(f"m:{n}", filled(50_000, n)) for n in range(16)])
    wrong: list[object] = []

    def work(n: int) -> None:
        try:
            for _ in range(20):
                if client.get_many([f"m:{n}"]) != [filled(50_000, n)]:
                    wrong.append(n)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert int(client.info()["connected_clients"]) <= 2


# --- sets, streams, hashes, servers ---


def test_a_bounded_set_keeps_the_highest_and_tells_who_went(
    shared_server: RedisServer, open_client: OpenClient
) -> None:
    client = open_client(shared_server)
    assert [client.set_add("z", bytes([65 + n]), n, keep=3) for n in range(4)] == [[], [], [], [b"A"]]
    assert client.set_add("z", b"low", -1, keep=3) == [b"low"]
    client.set_touch("z", {b"B": 9.5, b"absent": 99, b"D": 0})
    assert client.set_members("z") == [(b"B", 9.5), (b"D", 3), (b"C", 2)]
    assert client.set_add("z", b"B", 1, keep=3) == []
    assert client.set_members("z")[0] == (b"B", 9.5), "a later, lower score took the place of a higher one"
    assert (client.ttl_many(["z"])[0] or 0) > 600_000


def test_a_stream_is_appended_to_read_and_waited_on(shared_server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(shared_server)
    ids = [client.append("s", {"n": n, b"b": b"\x00\xff"}, keep=1000) for n in range(3)]
    assert client.tail("s", None, 2, 0) == [(ids[n], {b"n": b"%d" % n, b"b": b"\x00\xff"}) for n in range(2)]
    assert [name for name, _ in client.latest("s", 2)] == ids[:0:-1]
    begun = time.monotonic()
    assert client.tail("s", ids[-1], 10, 400) == []
    assert 0.35 < time.monotonic() - begun < 0.4 + MARGIN
    writer = threading.Timer(0.2, client.append, ("s", {"n": 9}, 1000))
    writer.start()
    assert [fields for _, fields in client.tail("s", ids[-1], 10, 3000)] == [{b"n": b"9"}]
    writer.join()
    for n in range(500):
        client.append("s", {"n": n}, keep=10)
    assert len(client.latest("s", 1000)) < 300
    assert client.state == "up"


def test_a_hash_and_the_servers_themselves(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server)
    client.hash_set("h", "a", b"1")
    client.hash_set("h", b"b", b"2")
    assert client.hash_all("h") == {b"a": b"1", b"b": b"2"}
    assert client.hash_remove("h", ["a", "x"]) == 1
    assert client.hash_all("h") == {b"b": b"2"}
    client.put_many([(f"scan:{n}", b"x") for n in range(2500)])
    assert {*client.scan("scan:*", count=100)} == {b"scan:%d" % n for n in range(2500)}
    told = client.info()
    assert (told["nodes"], told["keys"], told["maxmemory"]) == (1, 2501, 0)
    assert isinstance(told["used_memory"], int)
    assert str(told["redis_version"])[0].isdigit()
    assert 0 < client.ping() < 0.25


# --- ways to a server ---


def test_tls_with_own_certificate(start: Servers, open_client: OpenClient, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "tls")
    server = start.one(*certificates.options, tls=True)
    files = {"tls_cert": str(certificates.cert), "tls_key": str(certificates.key)}
    client = open_client(server, tls_ca=str(certificates.ca), **files)
    client.put_many([("a", filled(3 * MIB, 7)), ("b", b"x")])
    assert client.get_many(["a", "b"]) == [filled(3 * MIB, 7), b"x"]
    for wrong in ({"tls_ca": str(certificates.other), **files}, {**files}):
        stranger = open_client(server, timeout_ms=MS, **wrong)
        fails(lambda s=stranger: s.get_many(["a"]), Cause.CONNECTION)  # type: ignore[misc]
        fails_at_once(lambda s=stranger: s.get_many(["a"]))  # type: ignore[misc]
    without = open_client(server, timeout_ms=MS, tls_ca=str(certificates.ca))
    fails(lambda: without.get_many(["a"]), Cause.CONNECTION)
    server.stop()
    fails(lambda: open_client(server, timeout_ms=MS, tls_ca=str(certificates.ca), **files).ping(), Cause.TIMEOUT)
    closes_at_once(client)


def test_a_unix_socket_and_a_database(start: Servers, open_client: OpenClient, tmp_path: Path) -> None:
    server = start.one(("unixsocket", str(tmp_path / "s")))
    client = open_client(f"unix://{tmp_path}/s?db=3")
    client.put_many([("a", b"1")])
    assert client.get_many(["a"]) == [b"1"]
    assert open_client(f"{server.url}/3").get_many(["a"]) == [b"1"]
    assert open_client(server).get_many(["a"]) == [None]


def test_acl_user_and_password_file(start: Servers, open_client: OpenClient, tmp_path: Path) -> None:
    server = start.one(("user", "default off"), ("user", "tier on >secret ~kvcmas:* +@all -flushall"))
    file = tmp_path / "password"
    file.write_text("wrong\n")
    client = open_client(server, username="tier", password_file=str(file), breaker_ms=100)
    fails(lambda: client.get_many(["kvcmas:a"]), Cause.REFUSED)
    fails_at_once(lambda: client.get_many(["kvcmas:a"]))
    file.write_text("secret\n")
    time.sleep(0.12)
    client.put_many([("kvcmas:a", b"1")])
    assert client.get_many(["kvcmas:a"]) == [b"1"], "a password that was changed needs a restart"
    fails(lambda: client.put_many([("other:a", b"1")]), Cause.REFUSED)
    assert client.get_many(["kvcmas:a"]) == [b"1"], "a refused write stops reads"
    nobody = open_client(server)
    fails(lambda: nobody.get_many(["kvcmas:a"]), Cause.REFUSED)
    assert "secret" not in repr(client.settings)


def test_a_cluster_takes_batches_across_its_nodes(start: Servers, open_client: OpenClient) -> None:
    nodes = start.cluster()
    client = open_client(
        f"redis://127.0.0.1:{nodes[0].port}", mode="cluster", nodes=f"127.0.0.1:{nodes[1].port}", timeout_ms=2000
    )
    values = {f"kvcmas:{{{n}}}": filled(20_000 + n, n % 251) for n in range(60)}
    client.put_many(list(values.items()))
    assert client.get_many([*values, "{none}"]) == [*values.values(), None]
    assert all(client.exists_many(list(values)))
    assert {*client.scan("kvcmas:*")} == {key.encode() for key in values}
    told = client.info()
    assert (told["nodes"], told["keys"]) == (3, 60)
    client.set_add("{z}", b"m", 1, keep=2)
    assert client.set_members("{z}") == [(b"m", 1)]
    assert client.tail("{s}", None, 1, 10) == []

    # A slot goes to another node: the client is told by MOVED and asks for the map.
    key, value = next(iter(values.items()))
    slot = int(nodes[0].cli("CLUSTER", "KEYSLOT", key).strip(b":\r\n"))
    old = next(node for node in nodes if not node.cli("GET", key).startswith(b"-"))
    new = next(node for node in nodes if node is not old)
    name = new.cli("CLUSTER", "MYID").split(b"\r\n")[1]
    old.cli("DEL", key)
    for node in nodes:
        assert node.cli("CLUSTER", "SETSLOT", slot, "NODE", name) == b"+OK\r\n"
    client.put_many([(key, value)])
    assert client.get_many([key]) == [value]
    assert not new.cli("STRLEN", key).startswith(b"-")

    # One node hangs: its keys are misses after one time-out, the others' come.
    quick = open_client(f"redis://127.0.0.1:{nodes[0].port}", mode="cluster", timeout_ms=MS)
    assert all(quick.exists_many(list(values)))
    nodes[2].stop()
    for within in (MS / 1000 + MARGIN, 0.3):
        begun = time.monotonic()
        found = quick.read_into(list(values), lambda index, size: memoryview(bytearray(size)))
        assert time.monotonic() - begun < within
        assert 10 < sum(found) < 55
    nodes[2].go_on()
    wait_until(lambda: all(quick.read_into(list(values), lambda i, size: memoryview(bytearray(size)))), 10)


def test_sentinels_name_the_master_and_then_another(start: Servers, open_client: OpenClient) -> None:
    master = start.one()
    replica = start.replica(master)
    sentinel = start.sentinel(master, "tier")
    wait_until(
        lambda: (
            b"num-slaves" in (told := sentinel.cli("SENTINEL", "master", "tier"))
            and told.split(b"num-slaves\r\n")[1].split(b"\r\n")[1] == b"1"
        ),
        15,
    )
    client = open_client(
        "redis://127.0.0.1:1", mode="sentinel", sentinel_master="tier", nodes=f"127.0.0.1:{sentinel.port}"
    )
    client.put_many([("a", b"1")])
    wait_until(lambda: replica.cli("GET", "a") == b"$1\r\n1\r\n", 5)
    master.kill()
    fails(lambda: client.put_many([("b", b"2")]), Cause.CONNECTION, Cause.TIMEOUT)

    def writes() -> bool:
        try:
            client.put_many([("b", b"2")])
        except RedisUnavailable:
            return False
        return True

    wait_until(writes, 20)
    assert client.get_many(["a", "b"]) == [b"1", b"2"]
    assert b"2" in replica.cli("GET", "b")


# --- faults ---


def test_down_at_start(server: RedisServer, open_client: OpenClient) -> None:
    server.kill()
    client = open_client(server, timeout_ms=MS)
    assert client.state == "up", "the constructor connects"
    fails(lambda: client.get_many(["a"]), Cause.CONNECTION)
    assert client.state == "down"
    for call in (client.ping, client.info, lambda: client.put_many([("a", b"1")]), lambda: list(client.scan("*"))):
        fails_at_once(call)
    assert client.stats["breaker_opens"] == 1
    assert client.stats["error_connection"] == 1
    server.start()
    back_within_10_s(client)
    closes_at_once(client)


def test_killed_in_the_middle_of_a_batch(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server, timeout_ms=2000)
    keys = [f"k:{n}" for n in range(30)]
    client.put_many([(key, filled(MIB, 1)) for key in keys])
    memory: dict[int, bytearray] = {}

    def allocate(index: int, size: int) -> memoryview:
        if len(memory) == 5:
            server.kill()
        return into(memory)(index, size)

    found = client.read_into(keys, allocate)
    assert 5 <= sum(found) < 30
    assert all(memory[place] == filled(MIB, 1) for place, here in enumerate(found) if here)
    assert client.state == "down"
    fails_at_once(lambda: client.get_many(keys))
    server.start()
    back_within_10_s(client)
    assert client.get_many(keys) == [None] * 30


def test_a_server_that_hangs_costs_one_time_out(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server, timeout_ms=MS)
    client.put_many([("a", b"1")])
    server.stop()
    assert fails(lambda: client.get_many([f"k:{n}" for n in range(100)]), Cause.TIMEOUT) > 0.2
    fails_at_once(lambda: client.get_many(["a"]))
    # While one probes, the others go on failing at once.
    wait_until(lambda: _is_probed(client), 3)
    server.go_on()
    back_within_10_s(client)
    assert client.get_many(["a"]) == [b"1"]


def _is_probed(client: RedisClient) -> bool:
    """Several threads call; one of them probes, and hangs, the others do not."""
    waits: list[float] = []

    def call() -> None:
        begun = time.monotonic()
        with pytest.raises(RedisUnavailable):
            client.get_many(["a"])
        waits.append(time.monotonic() - begun)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slow = [wait for wait in waits if wait > MS / 1250]
    assert len(slow) <= 1, "several callers probed a hung server at once"
    assert max(waits) < MS / 1000 + MARGIN
    return bool(slow)


def test_close_does_not_wait_for_a_hung_server(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server, timeout_ms=20_000)
    client.put_many([("a", filled(MIB, 1))])
    server.stop()
    outcomes: list[Cause] = []

    def call(work: Callable[[], object]) -> None:
        try:
            work()
        except RedisUnavailable as error:
            outcomes.append(error.cause)

    calls: list[Callable[[], object]] = [
        lambda: client.get_many(["a"]),
        lambda: client.put_many([("a", filled(8 * MIB, 1))]),
        lambda: client.tail("s", None, 1, 20_000),
    ]
    threads = [threading.Thread(target=call, args=(work,)) for work in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    begun = time.monotonic()
    client.close()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - begun < 1
    assert outcomes == [Cause.CLOSED] * 3


def test_restarted_empty_is_a_miss_and_no_failure(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server, timeout_ms=MS)
    client.put_many([("a", b"1")])
    server.restart()
    assert client.get_many(["a"]) == [None]
    client.put_many([("a", b"2")])
    assert client.get_many(["a"]) == [b"2"]
    assert client.stats["reconnects"] == 1
    assert client.stats["breaker_opens"] == 0


def test_out_of_memory_stops_writes_but_not_reads(start: Servers, open_client: OpenClient) -> None:
    server = start.one(("maxmemory", "8mb"), ("maxmemory-policy", "noeviction"))
    client = open_client(server)
    client.put_many([("a", filled(MIB, 1))])
    fails(lambda: client.put_many([(f"f:{n}", filled(MIB, n)) for n in range(12)]), Cause.REFUSED, within=3)
    for write in (lambda: client.put_many([("x", b"")]), lambda: client.append("s", {"a": 1}, 9)):
        fails_at_once(write)
    assert client.get_many(["a"]) == [filled(MIB, 1)], "a full server is no longer read from"
    assert client.state == "up"
    server.cli("FLUSHALL")
    wait_until(lambda: _writes(client), 10)


def _writes(client: RedisClient) -> bool:
    try:
        client.put_many([("w", b"1")])
    except RedisUnavailable:
        return False
    return True


def test_a_read_only_replica_serves_reads(start: Servers, open_client: OpenClient) -> None:
    master = start.one()
    open_client(master).put_many([("a", b"1"), ("b", b"2")])
    client = open_client(start.replica(master), timeout_ms=MS)
    assert client.get_many(["a", "b", "c"] * 50) == [b"1", b"2", None] * 50
    fails(lambda: client.put_many([("a", b"3")]), Cause.REFUSED)
    fails_at_once(lambda: client.put_many([("a", b"3")]))
    assert client.get_many(["a"]) == [b"1"]


def test_wrong_password(start: Servers, open_client: OpenClient) -> None:
    server = start.one(("requirepass", "right"))
    for wrong in ({}, {"password": "wrong"}):
        client = open_client(server, timeout_ms=MS, **wrong)
        fails(lambda c=client: c.get_many(["a"]), Cause.REFUSED)  # type: ignore[misc]
        fails_at_once(lambda c=client: c.get_many(["a"]))  # type: ignore[misc]
    right = open_client(server, password="right")
    assert right.get_many(["a"]) == [None]


def test_a_slow_way_costs_one_deadline_connecting_included(
    start: Servers, server: RedisServer, open_client: OpenClient
) -> None:
    open_client(server).put_many([("a", b"1")])
    server.cli("CONFIG", "SET", "requirepass", "p")
    proxy = start.proxy(server, 0.2)
    url = f"redis://:p@127.0.0.1:{proxy.port}/0"
    # The password and the question take 0.2 s each.
    fails(lambda: open_client(url, timeout_ms=MS - 50).get_many(["a"]), Cause.TIMEOUT)
    patient = open_client(url, timeout_ms=1500)
    assert patient.get_many(["a"]) == [b"1"]


def test_a_batch_too_large_for_its_time_says_nothing_against_the_server(
    server: RedisServer, open_client: OpenClient
) -> None:
    patient, hasty = open_client(server), open_client(server, timeout_ms=60)
    keys = [f"k:{n}" for n in range(250)]
    patient.put_many([(key, filled(MIB, 1)) for key in keys])
    hasty.get_many(["absent"])
    found = hasty.read_into(keys, lambda index, size: memoryview(bytearray(size)))
    assert 0 < sum(found) < 250
    assert hasty.state == "up"
    assert hasty.stats["error_timeout"] == 1


def test_a_tail_ends_when_its_server_does(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server, timeout_ms=MS)
    client.append("s", {"a": 1}, 10)
    threading.Timer(0.2, server.stop).start()
    fails(lambda: client.tail("s", "9999999999999-0", 1, 600), Cause.TIMEOUT, within=0.6 + MS / 1000 + MARGIN)
    fails_at_once(lambda: client.tail("s", None, 1, 600))
    server.go_on()
    back_within_10_s(client)
    assert len(client.tail("s", None, 1, 600)) == 1
    threading.Timer(0.2, server.kill).start()
    fails(lambda: client.tail("s", "9999999999999-0", 1, 5000), Cause.CONNECTION, within=0.2 + MARGIN)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$9999999999999999999999\r\n", b"*-x\r\n"])
def test_what_is_no_redis_is_a_protocol_failure(open_client: OpenClient, answer: bytes) -> None:
    def serve() -> None:
        client, _ = listening.accept()
        client.recv(1000)
        client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        client = open_client(f"redis://127.0.0.1:{listening.getsockname()[1]}", timeout_ms=MS)
        fails(lambda: client.get_many(["a"]), Cause.PROTOCOL)
        fails_at_once(lambda: client.get_many(["a"]))
