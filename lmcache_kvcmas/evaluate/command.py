"""What `kvcmas evaluate` does once its options are parsed."""

import json
import os
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import ConfigError
from .chain import chain_units, evaluate_chain
from .dense import DenseModel
from .report import document, tables
from .run import EvaluateSettings, evaluate, units
from .runs import DenseRuns
from .workload import Workload, load_workload


def check(settings: EvaluateSettings, chain: tuple[str, ...], workload: Workload) -> None:
    """Raise ConfigError for options that do not fit the workload, before anything slow begins."""
    if not settings.edges and not chain:
        raise ConfigError("nothing to evaluate: give at least one --edge source:destination, or a --chain")
    if len(chain) == 1:
        raise ConfigError(f"--chain is {chain[0]!r}; it must name at least two roles, as in planner:solver:critic")
    for role in (*(r for edge in settings.edges for r in edge), *chain):
        if role not in workload.roles:
            raise ConfigError(f"role is {role!r}; it must be one of {', '.join(workload.roles)}")
    for source, destination in (*settings.edges, *pairwise(chain)):
        if source == destination:
            raise ConfigError(f"--edge {source}:{destination}: an edge leads from one role to another")
    if settings.anchors > len(workload.anchors):
        raise ConfigError(f"--anchors is {settings.anchors}; only {len(workload.anchors)} contexts have use: anchor")
    if not workload.tests:
        raise ConfigError("all contexts have use: anchor; at least one must be left to test on")


def run_command(
    model: Path, roles: Path, contexts: Path, settings: EvaluateSettings, chain: tuple[str, ...], out: Path | None
) -> None:
    """Evaluate, show tables, write ``out``. Raises ConfigError or UnsupportedModelError."""
    workload = load_workload(roles, contexts)
    check(settings, chain, workload)
    if out is not None and (out.is_dir() or not os.access(_parent(out), os.W_OK)):
        raise ConfigError(f"--json {out}: cannot be written")
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"loading {model.name}", total=None)
        runs = DenseRuns(DenseModel(model), workload)
        total = units(runs, settings) + (chain_units(runs, chain, settings.anchors) if chain else 0)
        bar.update(task, total=total)

        def progress(what: str) -> None:
            bar.update(task, description=what, advance=1)

        rows = evaluate(runs, settings, progress=progress)
        hops = evaluate_chain(runs, chain, settings.anchors, settings.knobs.rank, progress=progress) if chain else []
        bar.update(task, description="done")
    Console().print(tables(rows, hops))
    if out is not None:
        out.write_text(json.dumps(document(str(model), settings.shown(), rows, hops), indent=1) + "\n", "utf-8")


def _parent(path: Path) -> Path:
    """The folder of ``path``, made if it is not there. Raises ConfigError when it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--json {path}: {error}") from error
    return path.parent
