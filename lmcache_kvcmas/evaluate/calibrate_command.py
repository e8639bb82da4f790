"""What `kvcmas calibrate` does once its options are parsed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as combinations
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from ..config import Settings
from ..errors import ConfigError
from .calibrate import Budget, Measured, choose_theta, curve, judge
from .dense import DenseModel
from .document import document, write_document
from .figures import CurvePoint, HeldOut
from .methods import Knobs, Method, Sized, build_methods, product
from .serve import TraceRow
from .terminal import progress_bar, writable
from .traces import Trace
from .tracing import TraceBench, TraceSettings, by_workload, trace_units

_POINTS = 12  # of the curve, in a terminal


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings that may be chosen together with θ. One value each, unless asked for more."""

    head_tokens: tuple[int, ...]
    rank: tuple[int, ...]
    max_anchors: tuple[int, ...]

    def all(self) -> list[dict[str, int]]:
        names = ("head_tokens", "rank", "max_anchors")
        return [dict(zip(names, values, strict=True)) for values in combinations(*(getattr(self, n) for n in names))]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What was found."""

    chosen: dict[str, int]
    theta: float
    curve: Sequence[CurvePoint]
    heldout: HeldOut
    rows: Sequence[TraceRow]
    """Of the held-out traces."""


def calibrate(model: Path, traces: Sequence[Trace], settings: Settings, choice: Choice, budget: Budget) -> Calibrated:
    """Choose on the traces for ``dev``, check on those for ``test``; learn from those for ``learn``.

    Raises ConfigError when there are none of one kind, or when the budget cannot be measured on them.
    """
    for use in ("learn", "dev", "test"):
        if not any(t.use == use for t in traces):
            raise ConfigError(f"there are no traces for {use}: calibrating needs some of learn, dev and test")
    if budget.measure == "points" and not any(t.judge for t in traces):
        raise ConfigError(f"--budget {budget}: no trace has a right answer; give tasks or traces that have")
    trace_settings = TraceSettings(anchors=max(choice.max_anchors))
    with progress_bar(f"loading {model.name}") as bar:
        bench = TraceBench(DenseModel(model), trace_settings, bar)
        bar.expect(trace_units(traces, trace_settings, ("dev", "test")))
        workloads = by_workload(traces)
        learned = {name: bench.learn(some) for name, some in workloads.items()}

        def measure(methods: Sequence[Method], use: str) -> list[TraceRow]:
            both = (*build_methods(("none", "dense")), *methods)
            return [r for name, some in workloads.items() for r in bench.measure(some, both, learned[name], use)]

        open_gate = {str(i): _method(str(i), settings, values, math.inf) for i, values in enumerate(choice.all())}
        dev = measure(tuple(open_gate.values()), "dev")
        if not dev:
            raise ConfigError("no call of the traces for dev takes anything over: there is nothing to choose by")
        curves = {name: curve(Measured.of(dev, name), budget) for name in open_gate}
        best = {name: choose_theta(points, budget) for name, points in curves.items()}
        name = max(best, key=lambda n: best[n].reuse)
        values, theta = choice.all()[int(name)], _rounded(best[name].theta)
        test = measure((_method("kvcmas", settings, values, theta),), "test")
    heldout = judge(Measured.of(test, "kvcmas"), theta, budget)
    return Calibrated(values, theta, curves[name], heldout, test)


def run_calibrate(
    model: Path,
    traces: Sequence[Trace],
    settings: Settings,
    choice: Choice,
    budget: Budget,
    config: Path | None,
    out: Path | None,
) -> tuple[dict[str, Any], bool]:
    """Calibrate, show, write ``out``; the settings that the file should get, and whether held-out traces agree."""
    begun = perf_counter()
    writable(out)
    found = calibrate(model, traces, settings, choice, budget)
    Console().print(_table(found, budget))
    if out is not None:
        used = {name: getattr(settings, name) for name in ("predictor", "recompute_fraction", "anchor_tokens")}
        whole = document(str(model), used | found.chosen, traces=found.rows)
        whole["calibration"] = {
            "budget": str(budget),
            "confidence": budget.confidence,
            "theta": found.theta,
            "file": str(config) if config and found.heldout.within_budget else None,
            "curve": msgspec.to_builtins(found.curve),
            "heldout": msgspec.to_builtins(found.heldout),
        }
        write_document(out, whole, begun)
    asked = {n: v for n, v in found.chosen.items() if len(getattr(choice, n)) > 1}
    return {"theta": found.theta, **asked}, found.heldout.within_budget


def _method(name: str, settings: Settings, values: dict[str, int], theta: float) -> Sized:
    knobs = Knobs(values["rank"], values["head_tokens"], settings.recompute_fraction, theta)
    inner = product(settings.predictor, knobs)
    return Sized(name, inner, values["max_anchors"], values["rank"], settings.anchor_tokens)


def _rounded(theta: float) -> float:
    """Upwards, to four figures: the transition that it was taken from must still pass."""
    if theta <= 0:
        return 1e-6  # a θ of the file must be positive; no prediction has so small an ê
    scale = 10.0 ** (3 - math.floor(math.log10(theta)))
    return math.ceil(theta * scale) / scale


def _table(found: Calibrated, budget: Budget) -> Table:
    surely = f"{budget.confidence:.0%}"
    table = Table(
        title=f"θ for {budget}",
        caption="KL to dense in 1e-3 nats, mean over calls; reuse: shared tokens neither recomputed nor refused; "
        f"at most: {budget.measure} of {surely} of resampled traces",
    )
    for column in ("θ", "reuse", "KL", "÷ none", "accuracy", "at most"):
        table.add_column(column, justify="right")
    chosen = max((i for i, p in enumerate(found.curve) if p.theta <= found.theta), default=0)
    step = max(1, len(found.curve) // _POINTS)
    for i, point in enumerate(found.curve):
        if i % step and i not in (chosen, len(found.curve) - 1):
            continue
        cells = (f"{point.theta:.4f}", *_figures(point), f"{point.at_most:.3g}")
        table.add_row(*cells, style="bold green" if i == chosen else None)
    held = found.heldout
    table.add_section()
    table.add_row("held out", *_figures(held), "", style="bold" if held.within_budget else "bold red")
    return table


def _figures(of: CurvePoint | HeldOut) -> tuple[str, ...]:
    accuracy = "" if of.accuracy is None else f"{of.accuracy:.2f}"
    return f"{of.reuse:.2f}", f"{1e3 * of.kl:.2f}", f"{of.kl_vs_none:.3f}", accuracy
