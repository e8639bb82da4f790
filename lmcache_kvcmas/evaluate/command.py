"""What `kvcmas evaluate` does once its options are parsed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
from rich.console import Console

from ..errors import ConfigError
from .ablate import AXES, ablate
from .chain import chain_units, evaluate_chain
from .dense import DenseModel
from .document import document, write_document
from .frameworks import Framework
from .methods import build_methods
from .ranks import effective_ranks
from .report import ablation_tables, tables
from .run import EvaluateSettings, evaluate, units
from .runs import DenseRuns
from .tasks import Counts, make_traces
from .terminal import progress_bar, writable
from .trace_file import read_traces
from .traces import Trace
from .tracing import TraceSettings, evaluate_traces, trace_units
from .workload import Workload, load_workload


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Which workflows are served, and how. Nothing, unless task sets or a file are named."""

    tasks: tuple[str, ...] = ()
    file: Path | None = None
    framework: Framework = field(default_factory=Framework)
    counts: Counts = field(default_factory=Counts)
    settings: TraceSettings = field(default_factory=TraceSettings)

    def load(self) -> list[Trace]:
        """Raises ConfigError like `make_traces` and `read_traces`."""
        traces = make_traces(self.tasks, self.counts, self.framework) if self.tasks else []
        return traces + (read_traces(self.file) if self.file else [])

    def shown(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "tasks": list(self.tasks),
            "traces": str(self.file) if self.file else None,
            "framework": asdict(self.framework),
            "counts": asdict(self.counts),
            **asdict(self.settings),
        }


def run_ablate(
    model: Path, roles: Path, contexts: Path, edges: tuple[tuple[str, str], ...], axes: Sequence[str], out: Path | None
) -> None:
    """Ablate, show a table for each axis, write ``out``. Raises ConfigError or UnsupportedModelError."""
    begun = perf_counter()
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise ConfigError(f"--axes: {unknown[0]!r} is not one; it must be some of {', '.join(AXES)}")
    workload = load_workload(roles, contexts)
    edges = edges or tuple(pairwise(workload.roles))
    settings = EvaluateSettings(edges, anchors=len(workload.anchors))
    check(settings, (), workload)
    writable(out)
    with progress_bar(f"loading {model.name}") as bar:
        runs = DenseRuns(DenseModel(model), workload)
        agents = [edges[0][0], *(b for _, b in edges)]
        bar.expect(
            (units(runs, settings) if axes != ["topology"] else 0)
            + (chain_units(runs, agents, 10) if "topology" in axes else 0)
        )
        found = ablate(runs, edges, axes, bar)
    Console().print(ablation_tables(found))
    if out is not None:
        whole = document(str(model), {"edges": edges, "axes": list(axes)})
        whole["ablations"] = msgspec.to_builtins(found)
        write_document(out, whole, begun)


def check(settings: EvaluateSettings, chain: tuple[str, ...], workload: Workload) -> None:
    """Raise ConfigError for options that do not fit the workload, before anything slow begins."""
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
    model: Path,
    roles: Path | None,
    contexts: Path | None,
    settings: EvaluateSettings,
    chain: tuple[str, ...],
    traces: TraceOptions,
    out: Path | None,
) -> None:
    """Evaluate, show tables, write ``out``. Raises ConfigError or UnsupportedModelError."""
    begun = perf_counter()
    if not settings.edges and not chain and not traces.tasks and traces.file is None:
        raise ConfigError(
            "nothing to evaluate: give at least one --edge source:destination, --chain, --tasks or --traces"
        )
    workload = Workload({}, {}, ())
    if settings.edges or chain:
        if roles is None or contexts is None:
            raise ConfigError("--edge and --chain need --roles and --contexts: what the agents are, and what they read")
        workload = load_workload(roles, contexts)
        check(settings, chain, workload)
    served = traces.load()
    writable(out)
    with progress_bar(f"loading {model.name}") as bar:
        runs = DenseRuns(DenseModel(model), workload)
        of_chain = chain_units(runs, chain, settings.anchors) if chain else 0
        bar.expect(units(runs, settings) + of_chain + trace_units(served, traces.settings))
        rows = evaluate(runs, settings, progress=bar)
        hops = evaluate_chain(runs, chain, settings.anchors, settings.knobs.rank, progress=bar) if chain else []
        ranks = {
            f"{a}:{b}": effective_ranks([runs.case(a, b, c) for c in workload.anchors[: settings.anchors]])
            for a, b in settings.edges
        }
        methods = build_methods(settings.methods, settings.knobs)
        of_traces = evaluate_traces(runs.model, served, methods, traces.settings, bar)
    console = Console()
    console.print(tables(rows, hops, of_traces, console.width))
    if out is not None:
        options = settings.shown() | {"workloads": traces.shown()}
        whole = document(str(model), options, rows, hops, of_traces, ranks)
        write_document(out, whole, begun)
