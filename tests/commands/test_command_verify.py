"""`kvcmas verify`: what a server would refuse is found before a server meets it, and nothing else is called damage."""

from command_line import run
from filled import MARK, MODEL, TENANTS, Filled

from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.keys import KeySpace


def counted(output: str) -> dict[str, int]:
    """The figures behind "dangling", "incomplete" and "damaged"."""
    words = (line.split() for line in output.splitlines())
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[0] in ("dangling", "incomplete", "damaged")}


def verify(filled: Filled, *options: str) -> tuple[int, dict[str, int], str]:
    result = run("verify", "--config", filled.config, *options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, counted(result.output), result.output


def test_what_servers_wrote_is_whole(filled: Filled) -> None:
    code, found, output = verify(filled)
    assert (code, found) == (0, {"dangling": 0, "incomplete": 0, "damaged": 0}), output
    for kind in ("record", "base", "delta", "anchor"):
        assert f"{kind} {len(filled.keys(kind))}" in " ".join(output.split())


def test_all_kinds_of_damage_are_found_and_repaired(filled: Filled) -> None:
    server = filled.server
    flipped, truncated = filled.keys("base")[0], filled.keys("delta")[0]
    size = int(server.cli("STRLEN", flipped)[1:-2])
    server.cli("SETRANGE", flipped, size - 1, b"\xa5")
    [whole] = filled.client.get_many([truncated])
    assert whole is not None
    filled.client.put_many([(truncated, bytes(whole)[:-64])])
    other = filled.keys("anchor")
    [blob] = filled.client.get_many([other[0]])
    assert blob is not None
    filled.client.put_many([(other[1], bytes(blob))])  # whole, but of another name
    server.cli("ZADD", filled.keys("pool")[0], "1", b"x" * 32)
    code, found, output = verify(filled)
    assert code == 1
    assert found["damaged"] == 3
    assert found["dangling"] == 2  # the invented one, and the one whose anchor is damaged
    assert 1 <= found["incomplete"] <= 2  # records of the damaged base and delta
    flat = "".join(output.split())
    assert all(name in flat for name in (flipped, truncated, other[1]))
    assert "payload is damaged" in " ".join(output.split())
    before = filled.everything()
    code, _, output = verify(filled, "--repair")
    assert code == 1
    assert "repaired" in output
    assert verify(filled)[:2] == (0, {"dangling": 0, "incomplete": 0, "damaged": 0})
    gone = before - filled.everything()
    assert {flipped, truncated, other[1]} < gone
    assert len(gone) == 3 + found["incomplete"]


def test_an_evicted_entry_is_no_damage(filled: Filled) -> None:
    filled.server.cli("DEL", filled.keys("base")[0])
    code, found, output = verify(filled)
    assert (code, found) == (0, {"dangling": 0, "incomplete": 1, "damaged": 0}), output


def test_the_records_of_two_ranks_need_both(filled: Filled) -> None:
    """With two ranks, a base of one alone does not make a record complete."""
    for kind in ("base", "delta"):
        for name in filled.keys(kind):
            filled.server.cli("RENAME", name, name.replace(":0-1:", ":0-2:"))
    code, found, _ = verify(filled)
    assert found["incomplete"] == len(filled.keys("record"))
    assert code == 1  # the entries themselves say that they belong to rank 0 of 1


def test_reading_does_not_prolong_lives(filled: Filled) -> None:
    name = filled.keys("base")[0]
    filled.server.cli("EXPIRE", name, 1000)
    verify(filled)
    assert int(filled.server.cli("TTL", name)[1:-2]) <= 1000


def test_names_of_ours_are_spelt_as_servers_spell_them(filled: Filled) -> None:
    from lmcache_kvcmas.connectors.commands.catalogue import entry_name

    key = KeySpace(MODEL, TENANTS[0]).base(b"x")
    assert entry_name("kvcmas", MARK, EntryKind.BASE, 0, 1, key).decode() == filled.names.entry(EntryKind.BASE, key)
