"""A setting that is silently wrong is a server that runs for weeks in a way that its operator did not choose."""

from typing import Any

import pytest

from lmcache_kvcmas.config import PREDICTORS, Settings, refuse_misplaced
from lmcache_kvcmas.errors import ConfigError


def read(**values: Any) -> Settings:
    return Settings.from_extra_config({f"kvcmas.{name}": value for name, value in values.items()})


def test_without_any_setting_the_documented_defaults_hold() -> None:
    """The README and the example file promise these."""
    assert Settings.from_extra_config(None) == Settings.from_extra_config({}) == Settings()
    settings = Settings()
    assert (settings.rank, settings.head_tokens, settings.predictor) == (32, 32, "attention")
    assert settings.recompute_fraction == 0.08
    assert (settings.max_anchors, settings.min_anchors, settings.anchor_tokens) == (10, 2, 256)
    assert (settings.theta, settings.chain_theta) == (0.048, 0.096)
    assert settings.hot_bytes == 2**30


def test_what_is_set_is_what_holds() -> None:
    """Every setting reaches the code under its own name."""
    values: dict[str, Any] = {
        "rank": 16, "head_tokens": 0, "recompute_fraction": 1, "min_run_tokens": 128, "max_gap_tokens": 0,
        "max_anchors": 5, "anchor_tokens": 64, "min_anchors": 1, "predictor": "mean", "theta": 1, "chain_theta": 0.5,
        "salt": "tenant", "max_records": 7, "hot_bytes": 12345, "learn": False, "capture": False, "nested": False,
        "base_codec": "int8",
    }  # fmt: skip
    settings = read(**values)
    assert {name: getattr(settings, name) for name in Settings.__slots__} == values


def test_what_is_recomputed_is_a_share_of_what_is_predicted() -> None:
    """All of it and none of it can be asked for; without anchors, nothing says which tokens are worth it."""
    assert [read(recompute_fraction=share).recomputed(700) for share in (0, 0.1, 1.0)] == [0, 70, 700]
    assert read(recompute_fraction=0.1, predictor="none").recomputed(700) == 0


def test_chain_theta_follows_theta_unless_it_is_set() -> None:
    """Whoever calibrates theta for a model must not be held back by another model's chain threshold."""
    assert read(theta=0.1).chain_theta == pytest.approx(0.2)
    assert read(theta=0.1, chain_theta=0.15).chain_theta == 0.15


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 << 20), ("1GiB", 1 << 30), ("1.5 gib", 3 << 29), ("2 GB", 2 * 10**9), ("77", 77), (0, 0)],
)
def test_sizes_are_read_as_people_write_them(text: Any, size: int) -> None:
    """A budget that is read a thousand times too large takes the machine down."""
    assert read(hot_bytes=text).hot_bytes == size


_BAD: list[tuple[str, Any]] = [
    *[("rank", bad) for bad in (0, 257, -1, 32.0, "32", True, None, [32], 10**30)],
    *[("head_tokens", bad) for bad in (-1, 1025, 1.5)],
    *[("recompute_fraction", bad) for bad in (-0.01, 1.01, "5%", float("nan"), float("inf"), True, None, 10**400)],
    *[("min_run_tokens", bad) for bad in (63, "many")],
    *[("max_gap_tokens", bad) for bad in (-1, None)],
    *[("max_anchors", bad) for bad in (0, 65)],
    *[("anchor_tokens", bad) for bad in (15, 4097)],
    *[("min_anchors", bad) for bad in (0, 65)],
    *[("predictor", bad) for bad in ("Attention", "", None, 1, ["mean"])],
    *[("base_codec", bad) for bad in ("INT8", "", None, 8)],
    *[("theta", bad) for bad in (0, -0.1, "0.05", float("nan"), float("inf"), True, None, 10**400)],
    *[("chain_theta", bad) for bad in (0, 0.0, -1)],
    *[("salt", bad) for bad in (12, None, "x" * 257)],
    *[("max_records", bad) for bad in (0, "4k")],
    *[("hot_bytes", bad) for bad in (-1, "1 potato", "GiB", "-1GiB", "1e99", "9" * 5000, 1.5, True, "9999 GiB", "")],
    *[("learn", bad) for bad in (1, 0, "true", None)],
    *[("capture", bad) for bad in ("yes", 1)],
    *[("nested", bad) for bad in ("off", 0)],
]


@pytest.mark.parametrize(("name", "bad"), _BAD, ids=lambda value: str(value)[:20])
def test_an_impossible_value_is_refused_with_name_value_and_what_is_allowed(name: str, bad: Any) -> None:
    """Whoever wrote it must be able to put it right without reading code."""
    with pytest.raises(ConfigError) as caught:
        read(**{name: bad})
    message = str(caught.value)
    assert f"kvcmas.{name} is" in message
    assert repr(bad)[:70] in message
    assert "Allowed: " in message
    assert len(message) < 300
    if name != "chain_theta":  # 0.0 is the constructor's own word for "2·theta"
        with pytest.raises(ConfigError):
            Settings(**{name: bad})


def test_every_predictor_can_be_chosen() -> None:
    """The list in the message is the list that works."""
    assert {read(predictor=name).predictor for name in PREDICTORS} == {"attention", "paper", "mean", "none"}


def test_more_anchors_needed_than_kept_is_refused() -> None:
    """No edge would ever become ready, and nothing would say why."""
    with pytest.raises(ConfigError, match=r"min_anchors is 4.*max_anchors \(3\)"):
        read(min_anchors=4, max_anchors=3)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("kvcmas.rnak", "kvcmas.rank"),
        ("kvcmas.Rank", "kvcmas.rank"),
        ("kvcmas.head-tokens", "kvcmas.head_tokens"),
        ("kvcmas.chain_teta", "kvcmas.chain_theta"),
        ("KVCMAS.theta", "kvcmas.theta"),
        ("kvcmas_predictor", "kvcmas.predictor"),
        ("kvmcas.salt", "kvcmas.salt"),
        ("kvcmas", "kvcmas.rank"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_one_named(given: str, meant: str) -> None:
    """A slip in a key would otherwise leave the default in place, unseen."""
    with pytest.raises(ConfigError) as caught:
        Settings.from_extra_config({given: 1})
    assert given in str(caught.value)
    assert f"Did you mean {meant}?" in str(caught.value)
    with pytest.raises(ConfigError, match="extra_config"):
        refuse_misplaced({given: 1})


def test_other_peoples_keys_are_left_alone() -> None:
    """extra_config belongs to every plugin of LMCache's."""
    others = {"use_odirect": True, "storage_plugin.mine.class_name": "X", "kvcomm.rank": 1, 7: 7, None: None}
    assert Settings.from_extra_config(others) == Settings()
    refuse_misplaced({**others, "chunk_size": 256})


def test_settings_cannot_be_changed_afterwards() -> None:
    """Scheduler and workers each read them once; they must go on agreeing."""
    with pytest.raises(AttributeError):
        Settings().rank = 3  # type: ignore[misc]
