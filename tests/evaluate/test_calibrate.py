"""A threshold chosen from one's own traces. Chosen wrongly, agents read worse caches than their owner allowed."""

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import text
from typer.testing import CliRunner

from lmcache_kvcmas.connectors.cli import app
from lmcache_kvcmas.connectors.lmcache_edit import write_settings
from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.evaluate.calibrate import Budget, Measured, choose_theta, curve, judge
from lmcache_kvcmas.evaluate.measures import bootstrap
from lmcache_kvcmas.evaluate.serve import TraceRow

EXAMPLE = Path(__file__).parents[2] / "examples" / "lmcache-kvcmas.yaml"
ROW = TraceRow(
    workload="w",
    trace="t",
    seed=0,
    hop=1,
    edge="a:b",
    method="kvcmas",
    shared=100,
    kl=0.0,
    top1=1.0,
    exact=True,
    ehat=0.0,
    recompute=0.2,
    reuse=0.8,
    state_bytes=0,
    reference_prefills=0,
    accepted=1.0,
    score=None,
    seconds=0.0,
)


def measured(calls: list[tuple[float, float, float | None]]) -> Measured:
    """Of (ê, KL, score) a call; rotation only has a KL of 1, dense is right."""
    ours = [replace(ROW, trace=f"t{i}", ehat=e, kl=kl, score=s) for i, (e, kl, s) in enumerate(calls)]
    return Measured(
        ours,
        [replace(r, kl=1.0) for r in ours],
        [replace(r, kl=0.0, score=None if r.score is None else 1.0) for r in ours],
    )


def at_the_mean(measure: str, limit: float) -> Budget:
    return Budget(measure, limit, 0.5)


def test_the_curve_by_hand() -> None:
    points = curve(measured([(0.01, 0.1, 1.0), (0.03, 0.5, 0.0), (0.02, 0.2, None)]), Budget("points", 1))
    assert [p.theta for p in points] == [0, 0.01, 0.02, 0.03]
    assert [p.kl for p in points] == pytest.approx([0, 0.1 / 3, 0.1, 0.8 / 3])
    assert [p.kl_vs_none for p in points] == [p.kl for p in points]
    assert [p.reuse for p in points] == pytest.approx([0, 0.8 / 3, 1.6 / 3, 0.8])
    assert [p.accepted for p in points] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [p.points for p in points] == [0, 0, 0, 50]


def test_the_most_reuse_within_the_budget() -> None:
    calls = measured([(0.01, 0.1, 1.0), (0.03, 0.5, 0.0), (0.02, 0.2, 1.0)])

    def theta(budget: Budget) -> float:
        return choose_theta(curve(calls, budget), budget).theta

    assert theta(at_the_mean("kl", 0.11)) == 0.02
    assert theta(at_the_mean("kl", 0.05)) == 0.01
    assert theta(at_the_mean("kl", 1)) == 0.03
    assert theta(at_the_mean("points", 5)) == 0.02
    assert theta(at_the_mean("kl_vs_none", 0)) == 0
    # The mean over all traces is .1 at θ = .02; over three drawn with replacement it is above .11 in some of ten cases.
    assert theta(Budget("kl", 0.11, 0.9)) == 0.01


@pytest.mark.parametrize("measure", ["kl", "kl_vs_none", "points"])
def test_the_surer_the_less(measure: str) -> None:
    """Whole traces are drawn: calls of one go together."""
    rng = random.Random(0)
    calls = measured([(0.01 * (i + 1), rng.random(), float(rng.random() < 0.5)) for i in range(30)])
    calls = Measured(*([replace(r, trace=f"t{i // 3}") for i, r in enumerate(rows)] for rows in calls))
    ends = [curve(calls, Budget(measure, 1, sure))[-1].at_most for sure in (0.5, 0.8, 0.9, 0.99)]
    assert ends == sorted(set(ends))
    point = curve(calls, Budget(measure, 1))[-1]
    of_traces = [
        sum(100 * (1 - r.score) if measure == "points" else r.kl for r in calls.ours[i : i + 3]) / 3
        for i in range(0, 30, 3)
    ]
    assert point.at_most == pytest.approx(bootstrap(of_traces, level=0.8)[1])
    assert ends[0] == pytest.approx(fmean(of_traces), rel=0.05), "half of the draws are above the mean"


@given(
    st.lists(st.tuples(st.floats(1e-3, 1), st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=20),
    st.floats(0, 1),
)
def test_a_choice_is_within_its_budget_and_none_within_it_reuses_more(
    calls: list[tuple[float, float, float]], limit: float
) -> None:
    budget = Budget("kl", limit)
    points = curve(measured(list(calls)), budget)
    chosen = choose_theta(points, budget)
    assert max(chosen.kl, chosen.at_most or 0.0) <= limit
    assert all(p.reuse <= chosen.reuse for p in points if max(p.kl, p.at_most or 0.0) <= limit)
    assert [p.reuse for p in points] == sorted(p.reuse for p in points)


def test_held_out_traces_are_judged_as_they_were_served() -> None:
    some = measured([(0.01, 0.1, 1.0), (0.9, 0.5, 0.0)])
    held = judge(some, 0.02, Budget("kl", 0.1))
    assert held.kl == pytest.approx(0.3)
    assert not held.within_budget
    assert judge(some, 0.02, Budget("kl", 0.31)).within_budget
    assert held.points == 50


@pytest.mark.parametrize("given", ["kl<=0.003", " kl_vs_none <= 0.12", "points<=0.5"])
def test_budgets(given: str) -> None:
    budget = Budget.parse(given)
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize("given", ["kl", "kl<0.1", "kl<=x", "kl<=-1", "kl<=inf", "loss<=1", "kl<=1e", "kl<=nan"])
def test_other_budgets_are_named(given: str) -> None:
    with pytest.raises(ConfigError, match="--budget is"):
        Budget.parse(given)


def test_a_budget_of_points_needs_right_answers() -> None:
    with pytest.raises(ConfigError, match="right answer"):
        curve(measured([(0.1, 0.1, None)]), Budget("points", 1))


# the LMCache file


def test_only_its_own_key_changes(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    shutil.copy(EXAMPLE, file)
    backup = write_settings(file, {"theta": 0.0412})
    assert backup.read_text() == EXAMPLE.read_text()
    old, new = EXAMPLE.read_text().splitlines(), file.read_text().splitlines()
    changed = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    assert len(changed) == 1
    assert "kvcmas.theta: 0.0412" in changed[0][1]
    assert changed[0][1].split("#")[1] == changed[0][0].split("#")[1]
    assert not list(tmp_path.glob("*.new"))


def test_a_file_without_our_settings_gets_one(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("# mine\nlocal_cpu: true\n")
    write_settings(file, {"theta": 0.05})
    assert file.read_text().startswith("# mine\nlocal_cpu: true\n")
    assert yaml.safe_load(file.read_text()) == {"local_cpu": True, "extra_config": {"kvcmas.theta": 0.05}}


@pytest.mark.parametrize("content", ["[1, 2]", "extra_config: 7", "a: [", "extra_config: {kvcmas.rnk: 3}"])
def test_a_file_that_is_wrong_stays_as_it_is(tmp_path: Path, content: str) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError):
        write_settings(file, {"theta": 0.05})
    assert file.read_text() == content
    assert list(tmp_path.iterdir()) == [file]


# the command, on a model that takes milliseconds


def write_traces(file: Path, each: int = 4) -> None:
    """Two agents; each use has its own contexts."""
    lines = []
    for number, use in enumerate(u for u in ("learn", "dev", "test") for _ in range(each)):
        context = text(1000 + number, 100 + 7 * number)
        for agent, role in (("solver", text(101, 20)), ("critic", text(102, 31))):
            messages = [
                {"role": "system", "content": role},
                {"role": "user", "content": f"{context} {text(103 + len(agent), 6)}"},
            ]
            lines.append({"trace": f"t{number}", "agent": agent, "messages": messages, "use": use, "max_tokens": 8})
    file.write_text("\n".join(map(json.dumps, lines)))


def test_the_command(tiny_folder: Path, tmp_path: Path) -> None:
    traces, config, out = tmp_path / "requests.jsonl", tmp_path / "lmcache.yaml", tmp_path / "out.json"
    write_traces(traces)
    shutil.copy(EXAMPLE, config)
    options = ["calibrate", "--model", str(tiny_folder), "--traces", str(traces), "--json", str(out)]
    options += ["--config", str(config), "--budget", "kl<=10", "--rank", "4,8"]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    found = written["calibration"]
    assert found["confidence"] == 0.9
    assert all(p["at_most"] >= p["kl"] for p in found["curve"])
    ehats = [p["theta"] for p in found["curve"]]
    assert ehats == sorted(ehats)
    assert max(ehats) <= found["theta"] <= 1.001 * max(ehats), "all of it is within so large a budget"
    assert found["heldout"]["within_budget"]
    assert found["file"] == str(config)
    assert 0 < found["heldout"]["reuse"] < 1
    extra = yaml.safe_load(config.read_text())["extra_config"]
    assert extra["kvcmas.theta"] == found["theta"]
    assert extra["kvcmas.rank"] in (4, 8)
    assert extra["kvcmas.head_tokens"] == 32
    assert Path(f"{config}.bak").read_text() == EXAMPLE.read_text()
    assert "held out" in result.output


def test_a_check_that_fails_writes_nothing(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, config = tmp_path / "requests.jsonl", tmp_path / "lmcache.yaml"
    write_traces(traces, 3)
    shutil.copy(EXAMPLE, config)
    monkeypatch.setattr("lmcache_kvcmas.evaluate.calibrate_command.choose_theta", lambda points, budget: points[-1])
    out = tmp_path / "out.json"
    options = ["calibrate", "--model", str(tiny_folder), "--traces", str(traces), "--budget", "kl<=0.0000001"]
    result = CliRunner().invoke(app, [*options, "--config", str(config), "--json", str(out)])
    assert result.exit_code == 1, result.output
    assert "over the budget" in result.output
    assert config.read_text() == EXAMPLE.read_text()
    assert json.loads(out.read_text())["calibration"]["file"] is None


def test_nothing_to_learn_from_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    traces = tmp_path / "requests.jsonl"
    write_traces(traces)
    kept = [line for line in traces.read_text().splitlines() if '"use": "dev"' not in line]
    traces.write_text("\n".join(kept))
    result = CliRunner().invoke(app, ["calibrate", "--model", str(tiny_folder), "--traces", str(traces)])
    assert result.exit_code == 2
    assert "no traces for dev" in result.output


def test_evaluating_own_traces(tiny_folder: Path, tmp_path: Path) -> None:
    traces, out = tmp_path / "requests.jsonl", tmp_path / "out.json"
    write_traces(traces)
    options = ["evaluate", "--model", str(tiny_folder), "--traces", str(traces), "--methods", "all", "--json", str(out)]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    (workload,) = json.loads(out.read_text())["workloads"].values()
    assert workload["traces"] == 4
    assert workload["summary"]["dense"]["kl"] == pytest.approx(0, abs=1e-5)
    assert workload["summary"]["none"]["kl_vs_none"] == 1
    for summary in workload["summary"].values():
        assert math.isfinite(summary["kl"])
        assert 0 <= summary["recompute"] <= 1
        assert summary["accuracy"] is None
    assert {h["hop"] for h in workload["hops"]} == {1}
