"""Ablations decide defaults: a variant that does not differ, or differs in two things, would decide wrongly."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_methods import examples_of, files
from tiny_model import LONG, LONGER, NEW, SEEN, SHORT, TWIN
from typer.testing import CliRunner

from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors.cli import app
from lmcache_kvcmas.evaluate.ablate import AXES, variants
from lmcache_kvcmas.evaluate.methods import Predicted, Sized
from lmcache_kvcmas.evaluate.methods.picked import Evicting, PerKind
from lmcache_kvcmas.evaluate.runs import DenseRuns

OURS = Predicted("ours", "attention", 16)


def test_each_axis_has_the_default_once_and_changes_one_thing() -> None:
    every = variants(AXES)
    for axis in AXES[:-1]:
        some = [v for v in every if v.axis == axis]
        assert sum(v.default for v in some) == 1
        assert len({v.value for v in some}) == len(some) >= 2
    standard = {v.axis: v.method for v in every if v.default}
    sized = [m for m in standard.values() if isinstance(m, Sized) and m.anchors == Settings().max_anchors]
    assert len({replace(m, name="") for m in sized}) == 1, "the default of every axis is one and the same method"
    assert len(sized) == 7


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("oldest", (LONG, LONGER, SEEN)), ("newest", (TWIN, SHORT, LONG)), ("published", None), ("mass", None)],
)
def test_eviction(policy: str, kept: tuple | None, tiny: DenseRuns) -> None:
    """Three of five have room."""
    five = examples_of(tiny, TWIN, SHORT, LONG, LONGER, SEEN)
    evicting = Evicting("e", OURS, policy, 3).learned(five)
    case = tiny.case("solver", "critic", NEW)
    run = evicting.apply(case).run
    if kept is None:
        assert isinstance(evicting.inner, Predicted)
        mass = evicting.inner.predictor.layer(1, case.source.k[1], case.source.v[1], case.offsets).mass  # type: ignore[union-attr]
        assert mass is not None
        assert len(mass) == 3
        return
    assert (run.k - OURS.learned(examples_of(tiny, *kept)).apply(case).run.k).abs().max() < 1e-6


def test_what_is_used_stays(tiny: DenseRuns) -> None:
    """The text comes again and again beside two others: by mass its own anchor survives, by age it does not."""
    stream = examples_of(tiny, TWIN, SHORT, replace(SEEN, id="x"), LONG, LONGER)
    case = tiny.case("solver", "critic", SEEN)
    errors = {
        policy: float((Evicting("e", OURS, policy, 2).learned(stream).apply(case).run.v - case.dense.v).norm())
        for policy in ("mass", "oldest")
    }
    assert errors["mass"] <= errors["oldest"]


def test_a_pool_for_each_kind(tiny: DenseRuns) -> None:
    contexts = [replace(c, kind=k) for c, k in ((TWIN, "a"), (SHORT, "b"), (LONG, "b"))]
    taught = PerKind("p", OURS, 5).learned(examples_of(tiny, *contexts))
    case = tiny.case("solver", "critic", replace(NEW, kind="b"))
    of_b = OURS.learned(examples_of(tiny, SHORT, LONG)).apply(case).run
    assert (taught.apply(case).run.k - of_b.k).abs().max() < 1e-6
    unknown = taught.apply(replace(case, kind="c"))
    assert unknown.ehat == 0, "no anchors"


def test_the_command(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["ablate", "--model", str(tiny_folder), *files(tmp_path)[:-2], "--json", str(out)]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())["ablations"]
    assert tuple(written) == AXES
    assert [a["value"] for a in written["anchors"]] == ["1", "2", "3"], "there are four anchor contexts"
    assert [a["value"] for a in written["topology"]] == ["uncorrected", "chained", "context-free", "star"]
    assert written["head"][-1]["recompute"] > written["head"][0]["recompute"]
    assert written["rank"][0]["state_bytes"] < written["rank"][1]["state_bytes"]


def test_an_unknown_axis_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    options = ["ablate", "--model", str(tiny_folder), *files(tmp_path)[:-2], "--axes", "rank,colour"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert "'colour' is not one" in result.output
