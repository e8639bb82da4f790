"""`kvcmas doctor`: what is wrong is named, with what to do; what is right is not called wrong."""

import json
from pathlib import Path

from command_line import run
from filled import Filled
from redis_server import Servers


def flat(output: str) -> str:
    return " ".join(output.split())


def config(folder: Path, url: str, more: str = "") -> Path:
    file = folder / "doctor.yaml"
    extra = f"  remote_storage_plugin.kvcmas.url: {url}\n  remote_storage_plugin.kvcmas.timeout_ms: 2000\n"
    file.write_text(
        f"max_local_cpu_size: 0.1\nremote_storage_plugins: [kvcmas]\nextra_config:\n{extra}  kvcmas.rank: 16\n{more}"
    )
    return file


def test_all_is_well(filled: Filled, model: Path) -> None:
    filled.server.cli("CONFIG", "SET", "maxmemory", "1gb")
    filled.server.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    before = filled.everything()
    result = run("doctor", "--config", config(filled.config.parent, filled.server.url), "--model", model)
    output = flat(result.output)
    assert result.exit_code == 0, output
    assert "fail" not in output
    for words in ("rank 16", "30 layers", "allkeys-lru", "GETEX" if "6.0" in output else "version", "read (8 MiB"):
        assert words in output
    assert "when an engine starts" in output
    assert max(map(len, result.output.splitlines())) <= 80
    assert filled.everything() == before, "the probe was removed"


def test_memory_that_is_never_freed_is_a_warning(command_servers: Servers, tmp_path: Path) -> None:
    server = command_servers.one(("maxmemory", "100mb"), ("maxmemory-policy", "noeviction"))
    result = run("doctor", "--config", config(tmp_path, server.url))
    assert result.exit_code == 0, result.output
    assert "writes are refused once it is full" in flat(result.output)


def test_down_is_a_failure(tmp_path: Path) -> None:
    result = run("doctor", "--config", config(tmp_path, "redis://127.0.0.1:1"))
    assert result.exit_code == 1
    assert "start Redis there" in flat(result.output)


def test_a_wrong_password_is_named_and_not_shown(command_servers: Servers, tmp_path: Path) -> None:
    server = command_servers.one(("requirepass", "right"))
    password = "  remote_storage_plugin.kvcmas.password: wr0ng-secret\n"
    result = run("doctor", "--config", config(tmp_path, server.url, password))
    assert result.exit_code == 1
    assert "remote_storage_plugin.kvcmas.password" in flat(result.output)
    assert "wr0ng-secret" not in result.output
    right = "  remote_storage_plugin.kvcmas.password: right\n"
    assert run("doctor", "--config", config(tmp_path, server.url, right)).exit_code == 0


def test_a_file_that_servers_refuse(tmp_path: Path) -> None:
    file = config(tmp_path, "redis://127.0.0.1:1", "  kvcmas.rnak: 3\n")
    result = run("doctor", "--config", file)
    assert result.exit_code == 1
    assert "kvcmas.rank" in flat(result.output)


def test_a_model_that_corrections_do_not_fit(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "deepseek_v3", "kv_lora_rank": 512}))
    file = tmp_path / "lmcache.yaml"
    file.write_text("max_local_cpu_size: 0.1\n")
    result = run("doctor", "--config", file, "--model", tmp_path)
    assert result.exit_code == 1
    assert "MLA" in flat(result.output)
    assert "nothing is shared between nodes" in flat(result.output)
