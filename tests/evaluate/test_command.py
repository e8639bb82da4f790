"""The command line of `kvcmas evaluate`: mistakes end in one clear line, before anything slow begins."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors import cli_measure
from lmcache_kvcmas.connectors.cli import app
from lmcache_kvcmas.evaluate.methods import DEFAULT_METHODS, Knobs
from lmcache_kvcmas.evaluate.runs import DenseRuns
from lmcache_kvcmas.evaluate.tasks import TASKS

EXAMPLE = Path(__file__).parents[2] / "examples" / "workload"
FILES = ["--roles", str(EXAMPLE / "roles.json"), "--contexts", str(EXAMPLE / "contexts.jsonl")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--edge", "solver"], "SOURCE:DESTINATION"),
        (["--edge", "a:b:c"], "SOURCE:DESTINATION"),
        (["--edge", "solver:judge"], "role is 'judge'; it must be one of planner, solver"),
        (["--edge", "solver:solver"], "from one role to another"),
        (["--edge", "solver:critic", "--anchors", "17"], "--anchors is 17; only 16"),
        (["--edge", "solver:critic", "--anchors", "0"], "--anchors"),
        (["--edge", "solver:critic", "--rank", "1000"], "--rank"),
        ([], "at least one --edge"),
        (["--chain", "solver"], "at least two roles"),
        (["--chain", "solver:critic:nobody"], "role is 'nobody'"),
        (["--edge", "solver:critic", "--json", "/dev/null/x.json"], "--json"),
        (["--edge", "solver:critic"], "not a Hugging Face model folder"),
    ],
)
def test_mistakes_are_named(options: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["evaluate", "--model", str(tmp_path), *FILES, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


METHODS = list(DEFAULT_METHODS)


def test_the_json_file_and_the_table(runs: DenseRuns, model: Path, tmp_path: Path) -> None:
    """Scripts read the file: its names are a promise. Three short contexts, so that this is quick."""
    some = [*runs.workload.anchors[2:6:3], *[c for c in runs.workload.tests if c.id == "d01"]]
    lines = [json.dumps({"id": c.id, "use": "anchor" if c.anchor else "dev", "text": c.text}) for c in some]
    contexts, out = tmp_path / "contexts.jsonl", tmp_path / "new" / "out.json"
    contexts.write_text("\n".join(lines))
    options = ["--model", str(model), *FILES[:2], "--contexts", str(contexts), "--anchors", "2", "--json", str(out)]
    options += ["--edge", "planner:solver", "--edge", "solver:critic", "--chain", "planner:solver:critic"]
    result = CliRunner().invoke(app, ["evaluate", *options], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert list(written["summary"]) == METHODS
    for summary in written["summary"].values():
        assert summary.keys() >= {
            "kl",
            "kl_vs_none",
            "kl_ci",
            "kl_vs_none_ci",
            "top1",
            "exact",
            "res_k",
            "res_v",
            "ehat",
        }
    assert written["summary"]["none"]["kl_vs_none"] == 1
    assert written["summary"]["oracle"]["kl"] < written["summary"]["none"]["kl"]
    assert set(written["edges"]) == {"planner:solver", "solver:critic"}
    assert {(r["method"], r["context"]) for r in written["rows"]} == {(m, "d01") for m in METHODS}
    assert [(s["mode"], s["hop"]) for s in written["chain"]["summary"]][:2] == [("uncorrected", 1), ("uncorrected", 2)]
    assert all(word in result.output for word in ("attention+head", "÷ none", "2: solver:critic"))


def test_help_does_not_load_torch() -> None:
    """`kvcmas --help` must answer at once."""
    code = (
        "import sys, lmcache_kvcmas.connectors.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert CliRunner().invoke(app, ["evaluate", "--help"]).exit_code == 0


def test_the_command_lines_defaults_are_the_products() -> None:
    """They are written out there, so that `--help` loads nothing heavy."""
    given = {name: p.default for name, p in inspect.signature(cli_measure.evaluate).parameters.items()}
    settings = Settings()
    ours = (settings.rank, settings.head_tokens, settings.recompute_fraction, settings.theta, settings.max_anchors)
    assert tuple(given[name] for name in ("rank", "head", "fraction", "theta", "anchors")) == ours
    assert (Knobs().rank, Knobs().head, Knobs().fraction, Knobs().theta) == ours[:4]
    assert set(cli_measure._TASKS) == set(TASKS)
