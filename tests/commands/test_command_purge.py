"""`kvcmas purge`: removes what was asked for and nothing else, and not by accident."""

import time

import msgspec
import pytest
from command_line import run
from filled import FOREIGN, MARK, MODEL, TENANTS, Filled, aged

from lmcache_kvcmas.connectors.commands.catalogue import Warm, warm_name
from lmcache_kvcmas.connectors.commands.shown import age, parse_age, size
from lmcache_kvcmas.tenants import tenant_mark


def purge(filled: Filled, *options: str, code: int = 0, said: str | None = None) -> tuple[set[str], str]:
    """What went, and what was said."""
    before = filled.everything()
    result = run("purge", "--config", filled.config, *options, said=said)
    assert result.exit_code == code, result.output
    return before - filled.everything(), result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "at least one of --edge"),
        (["--all", "--kind", "base"], "alone"),
        (["--edge", "planner"], "SOURCE:DESTINATION"),
        (["--older-than", "yesterday"], "as in 3d"),
        (["--kind", "bases"], "Allowed: record, base"),
        (["--tenant", "acme"], "12 hex digits"),
        (["--tenant", "0" * 12, "--salt", "x"], "one of them"),
    ],
)
def test_wrong_options_remove_nothing(filled: Filled, options: list[str], message: str) -> None:
    gone, output = purge(filled, *options, "--yes", code=2)
    assert not gone
    assert message in " ".join(output.replace("│", " ").split())


def test_no_keeps_all_and_yes_does_not(filled: Filled) -> None:
    gone, output = purge(filled, "--all", said="n\n", code=1)
    assert not gone
    assert "Remove" in output
    assert not purge(filled, "--all", said="", code=1)[0], "no terminal to ask: nothing goes"
    assert not purge(filled, "--all", "--dry-run")[0]
    purge(filled, "--all", said="y\n")
    assert filled.everything() == set(FOREIGN)


def test_an_edge_takes_its_anchors_and_nothing_else(filled: Filled) -> None:
    pools, anchors = filled.keys("pool"), filled.keys("anchor")
    lines = filled.client.hash_all(filled.names.edges)
    gone, _ = purge(filled, "--edge", "planner:solver", "--yes")
    assert len(gone & set(pools)) == len(TENANTS)
    assert len(gone & set(anchors)) == len(TENANTS) * filled.anchors
    assert len(gone) == len(TENANTS) * (1 + filled.anchors)
    left = filled.client.hash_all(filled.names.edges)
    assert set(left) == {field for field in lines if field.decode() not in gone}
    assert len(left) == len(TENANTS)
    assert "planner" not in run("inspect", "--config", filled.config).output
    assert run("verify", "--config", filled.config).exit_code == 0


def test_a_tenant_by_mark_or_by_salt(filled: Filled) -> None:
    theirs = set(filled.keys("*", TENANTS[0]))
    acme = set(filled.keys("*", TENANTS[1]))
    gone, _ = purge(filled, "--salt", "acme", "--yes")
    assert gone == acme
    gone, _ = purge(filled, "--tenant", tenant_mark(MODEL, TENANTS[0]), "--yes")
    assert gone - {filled.names.edges} == theirs  # the hash of edges goes with its last line


def test_age_is_when_an_entry_was_written(filled: Filled) -> None:
    old = [filled.keys("base")[0], filled.keys("anchor")[0]]
    for name in old:
        aged(filled.client, name, 5 * 86_400)
    assert not purge(filled, "--older-than", "6d", "--yes")[0]
    assert purge(filled, "--older-than", "3d", "--kind", "base", "--yes")[0] == {old[0]}
    gone, output = purge(filled, "--older-than", "3d", "--yes")
    assert gone == {old[1]}
    assert "1 places in pools" in output
    result = run("verify", "--config", filled.config)
    assert "dangling     0" in result.output, result.output


def test_a_kind_of_a_model(filled: Filled) -> None:
    assert not purge(filled, "--model", "0" * 16, "--yes")[0]
    anchors, pools = set(filled.keys("anchor")), set(filled.keys("pool"))
    gone, _ = purge(filled, "--model", MARK, "--kind", "anchor", "--yes")
    # A pool without members is none, and nor is a hash without fields.
    assert gone == anchors | pools | {filled.names.edges}
    gone, _ = purge(filled, "--model", MARK, "--yes")
    assert filled.everything() == set(FOREIGN)


def test_marks_of_warmup_go_with_their_tenant(filled: Filled) -> None:
    marks = [Warm(tenant_mark(MODEL, tenant), [], time.time()) for tenant in TENANTS]
    hashed = warm_name(filled.prefix, MARK)
    for n, mark in enumerate(marks):
        filled.client.hash_set(hashed, f"{n}", msgspec.msgpack.encode(mark))
    purge(filled, "--salt", "acme", "--kind", "delta", "--yes")
    assert set(filled.client.hash_all(hashed)) == {b"0"}


def test_ages_and_sizes_as_people_write_them() -> None:
    assert parse_age("90s") == 90
    assert parse_age("1.5h") == 5400
    assert parse_age("2w") == 14 * 86_400
    for wrong in ("", "3", "d", "-1d", "nand", "infd", "3 days"):
        with pytest.raises(ValueError, match=r"as in 3d|or more"):
            parse_age(wrong)
    assert [age(x) for x in (None, 0, 59, 3600, 100_000, 8 * 86_400)] == ["–", "0s", "59s", "1h", "1d 3h", "8d"]
    assert [size(x) for x in (0, 1023, 1024, 1 << 20, 3 << 30)] == ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "3.0 GiB"]
