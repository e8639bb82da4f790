"""LMCache drops unknown keys and only logs what it cannot read; a person must hear of it instead."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors import lmcache_api
from lmcache_kvcmas.connectors.lmcache_config import LMCacheConfig, load_lmcache_config
from lmcache_kvcmas.connectors.lmcache_open import StoreShape, open_store
from lmcache_kvcmas.connectors.lmcache_tiers import EventTap
from lmcache_kvcmas.entries import Owner
from lmcache_kvcmas.errors import ConfigError, UnsupportedEngineError

EXAMPLE = Path(__file__).parents[2] / "examples" / "lmcache-kvcmas.yaml"
SHAPE = StoreShape(layers=2, kv_heads=1, head_dim=8, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LMCACHE_CONFIG_FILE", "LMCACHE_EXTRA_CONFIG", "LMCACHE_CHUNK_SIZE"):
        monkeypatch.delenv(name, raising=False)


def load(folder: Path, text: str) -> LMCacheConfig:
    path = folder / "lmcache.yaml"
    path.write_text(text)
    return load_lmcache_config(str(path))


def test_the_example_file_is_right_complete_and_states_the_defaults() -> None:
    """It is what people copy."""
    config = load_lmcache_config(str(EXAMPLE))
    assert config.settings == Settings()
    assert (config.chunk_size, config.cpu_bytes, config.disk_bytes) == (256, 2 << 30, 0)
    extra = yaml.safe_load(EXAMPLE.read_text())["extra_config"]
    assert set(extra) == {f"kvcmas.{name}" for name in Settings.__slots__}


def test_the_disk_lines_of_the_example_work_when_they_are_switched_on(tmp_path: Path) -> None:
    """Commented-out lines are the ones that nobody runs."""
    text = EXAMPLE.read_text().replace("# local_disk", "local_disk").replace("# max_local_disk", "max_local_disk")
    config = load(tmp_path, text)
    assert (config.disk_bytes, config.engine.local_disk) == (20 << 30, "/var/cache/kvcmas/")


def test_the_file_is_found_by_lmcaches_own_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, one variable, as LMCache's users know it."""
    (tmp_path / "x.yaml").write_text("chunk_size: 64\nextra_config: {kvcmas.rank: 8}\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "x.yaml"))
    config = load_lmcache_config()
    assert (config.chunk_size, config.settings.rank) == (64, 8)


def test_without_a_file_lmcaches_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers are often configured by environment alone."""
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "32")
    monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", json.dumps({"kvcmas.rank": 16}))
    config = load_lmcache_config()
    assert (config.chunk_size, config.settings.rank) == (32, 16)
    for bad in ("{kvcmas.rank: 16}", "[1]", "16"):
        monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", bad)
        with pytest.raises(ConfigError, match="LMCACHE_EXTRA_CONFIG is"):
            load_lmcache_config()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kvcmas.rank: 32\n", r"kvcmas\.rank stands at the top level.*extra_config"),
        ("kvcmas: {rank: 32}\n", r"kvcmas stands at the top level.*extra_config"),
        ("extra_config: {kvcmas.rank: 0}\n", r"kvcmas\.rank is 0\. Allowed: a whole number from 1 to 256"),
        ("extra_config: {kvcmas.rnk: 32}\n", r"Did you mean kvcmas\.rank\?"),
        ("extra_config: [1]\n", r"extra_config .* is \[1\]"),
        ("extra_config: 'kvcmas.rank: 32'\n", "extra_config"),
        ("- 1\n- 2\n", "holds list"),
        ("chunk_size: [\n", "is not YAML"),
        ("chunk_size: many\n", "chunk_size is 'many'. Allowed: a number from 16"),
        ("chunk_size: [256]\n", "chunk_size|LMCache refuses"),
        ("chunk_size: 0\n", "chunk_size is 0"),
        ("max_local_cpu_size: 0\n", "max_local_cpu_size is 0"),
        ("max_local_cpu_size: -1\n", "max_local_cpu_size is -1"),
        ("max_local_cpu_size: 5GB\n", "max_local_cpu_size is '5GB'"),
        ("local_disk: /tmp/x\nmax_local_disk_size: lots\n", "max_local_disk_size is 'lots'"),
        ("local_cpu: false\n", "local_cpu is False. Allowed: true"),
        ("remote_url: redis://host:6379\n", "remote_url is 'redis://host:6379'"),
        ("use_layerwise: true\n", "use_layerwise is True"),
        ("enable_controller: true\n", "LMCache refuses|enable_controller"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    """Found at start-up, it is a minute's work; found by its effects, it is a day's."""
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, text)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    """LMCache raises whatever open() does."""
    with pytest.raises(ConfigError, match=r"LMCACHE_CONFIG_FILE is .*nowhere\.yaml"):
        load_lmcache_config(str(tmp_path / "nowhere.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_lmcache_config(str(tmp_path / "binary.yaml"))


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    """All settings are optional."""
    assert load(tmp_path, "").settings == Settings()
    assert load(tmp_path, "extra_config:\n").settings == Settings()


def test_a_budget_too_small_or_too_large_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    """Too small: nothing would ever be stored, silently. Too large: LMCache clears it all, until the machine is out."""
    wide = StoreShape(layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"max_local_cpu_size is 0\.05 \(GiB\).*at least 0\.125, four chunks of 256"):
        open_store(load(tmp_path, "max_local_cpu_size: 0.05\n"), Owner("m"), wide)
    with pytest.raises(ConfigError, match=r"max_local_cpu_size is 1e\+05 .*GiB of memory are available"):
        open_store(load(tmp_path, "max_local_cpu_size: 100000\n"), Owner("m"), SHAPE)


@pytest.mark.parametrize("folders", ["/proc/kvcmas", "/tmp/one,/tmp/two"])
def test_a_disk_folder_that_cannot_be_used_is_named(tmp_path: Path, folders: str) -> None:
    """LMCache would find out when the first context is pushed out of memory."""
    config = load(tmp_path, f"max_local_cpu_size: 0.01\nlocal_disk: {folders}\nmax_local_disk_size: 1\n")
    with pytest.raises(ConfigError, match=r"local_disk is '.*cannot be used"):
        open_store(config, Owner("m"), SHAPE)


def test_an_lmcache_without_what_we_need_is_refused_by_name() -> None:
    """Its in-process classes move between releases; a server must not find out in the middle of a request."""
    with pytest.raises(
        UnsupportedEngineError, match=r"LMCache \d+\.\d+.* has no Gone in lmcache\.v1\.config or lmcache"
    ):
        lmcache_api._find("Gone", "lmcache.v1.config", "lmcache.nowhere")
    with pytest.raises(UnsupportedEngineError, match="takes no colour"):
        lmcache_api._need(lmcache_api.StorageManager.allocate, "shapes", "colour")
    with pytest.raises(UnsupportedEngineError, match=r"sets no self\.colour"):
        lmcache_api._holds(lmcache_api.StorageManager.__init__, "self.loop", "self.colour")


def test_a_store_that_does_not_report_what_leaves_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the reports the scheduler would plan on entries that are gone; it is proved once, at start-up."""
    monkeypatch.setattr(EventTap, "add_kv_op", lambda self, op_type, key: None)
    with pytest.raises(UnsupportedEngineError, match="CPU tier failed to report"):
        open_store(load(tmp_path, "max_local_cpu_size: 0.01\n"), Owner("m"), SHAPE)
    monkeypatch.setattr(EventTap, "add_kv_op", lambda self: None)
    with pytest.raises(UnsupportedEngineError, match="CPU tier failed to commit"):
        open_store(load(tmp_path, "max_local_cpu_size: 0.01\n"), Owner("m"), SHAPE)
