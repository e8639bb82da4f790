"""`kvcmas inspect`: operators plan memory by its sums, so they have to be the server's."""

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from command_line import run
from filled import EDGES, FOREIGN, TENANTS, Filled
from redis_server import Servers

from lmcache_kvcmas.entries import EntryKind


def test_the_sums_are_the_servers(filled: Filled) -> None:
    result = run("inspect", "--json", "--config", filled.config)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    ours = {name for name in filled.everything() if name not in FOREIGN}
    assert told["server"]["keys"] == len(filled.everything())  # DBSIZE
    assert told["keys"] == len(ours)
    entries = [name for kind in ("record", "base", "delta", "anchor") for name in filled.keys(kind)]
    assert told["entries"] == len(entries)
    assert told["bytes"] == sum(int(filled.server.cli("STRLEN", name)[1:-2]) for name in entries) > 0
    [model] = told["models"]
    assert len(model["tenants"]) == len(TENANTS)
    for kind in EntryKind:
        counted = sum(tenant["kinds"][kind.value]["entries"] for tenant in model["tenants"])
        assert counted == len(filled.keys(kind.value)), kind
    assert sum(tenant["bytes"] for tenant in model["tenants"]) == told["bytes"]
    edges = {(e["source"], e["destination"], e["slot"]) for e in model["edges"]}
    assert edges == set(EDGES)
    assert all((e["anchors"], e["capacity"]) == (filled.anchors, 4) for e in model["edges"])
    assert all(0 <= e["newest_seconds"] <= e["oldest_seconds"] < 60 for e in model["edges"])
    assert 604_700 < told["ttl_seconds"]["min"] <= 604_800
    assert told["idle_seconds"]["median"] < 60


def test_json_is_all_of_stdout(filled: Filled) -> None:
    """Scripts pipe it: whatever LMCache has to say goes elsewhere."""
    kvcmas = Path(sys.executable).parent / "kvcmas"
    done = subprocess.run([kvcmas, "inspect", "--json", "--config", filled.config], capture_output=True, check=True)
    assert json.loads(done.stdout)["prefix"] == "kvcmas"


def test_a_cluster_is_looked_at_as_one(command_servers: Servers, tmp_path: Path) -> None:
    nodes = command_servers.cluster()
    with ExitStack() as opened:
        filled = Filled(nodes[0], tmp_path, opened, mode="cluster")
        told = json.loads(run("inspect", "--json", "--config", filled.config).stdout)
        assert told["server"]["nodes"] == 3
        assert told["keys"] == told["server"]["keys"] == len(filled.everything())
        assert run("verify", "--config", filled.config).exit_code == 0
        assert run("doctor", "--config", filled.config).exit_code == 0
        assert run("purge", "--all", "--yes", "--config", filled.config).exit_code == 0
        assert not filled.everything()


def test_the_tables_fit_80_columns(filled: Filled) -> None:
    result = run("inspect", "--config", filled.config)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "planner → solver" in result.output
    assert "2/4" in result.output


def test_an_empty_prefix_is_said(filled: Filled) -> None:
    text = filled.config.read_text().replace("prefix: kvcmas", "prefix: nobody")
    filled.config.write_text(text)
    result = run("inspect", "--config", filled.config)
    assert result.exit_code == 0, result.output
    assert "nothing under nobody" in result.output


def test_without_redis_it_says_what_to_set(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 16\n")
    for command in ("inspect", "verify", "purge --all"):
        result = run(*command.split(), "--config", file)
        assert result.exit_code == 2
        assert "remote_storage_plugins: [kvcmas]" in result.output


def test_a_server_that_is_down_is_one_line(filled: Filled) -> None:
    filled.config.write_text(filled.config.read_text().replace(filled.server.url, "redis://127.0.0.1:1"))
    result = run("inspect", "--config", filled.config)
    assert result.exit_code == 1
    assert "Redis is unavailable" in result.output


def test_help_is_quick() -> None:
    """`kvcmas --help` must answer at once."""
    heavy = "{'torch', 'transformers', 'lmcache', 'vllm', 'redis'} & set(sys.modules)"
    code = f"import sys, lmcache_kvcmas.connectors.cli; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    measuring = ("evaluate", "calibrate", "ablate", "report")
    for command in ("", "inspect", "verify", "purge", "doctor", "warmup", *measuring):
        result = run(*command.split(), "--help")
        assert result.exit_code == 0
        assert re.search(rf"Examples?: kvcmas {command}", " ".join(result.output.split())) or not command
