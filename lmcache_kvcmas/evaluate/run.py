"""Every method on every test context of every edge."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from .cases import Case, Examples, answers_of, rotated
from .measures import cache_errors
from .methods import DEFAULT_METHODS, Knobs, Method, build_methods
from .runs import DenseRuns


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    edges: tuple[tuple[str, str], ...]
    anchors: int = 10
    knobs: Knobs = field(default_factory=Knobs)
    methods: tuple[str, ...] = DEFAULT_METHODS
    """`method_names` of what was asked for: `none` is among them."""

    def shown(self) -> dict[str, Any]:
        """All of them, flat."""
        flat = asdict(self)
        knobs: dict[str, Any] = flat.pop("knobs")
        return flat | knobs


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one context of one edge."""

    edge: str
    context: str
    method: str
    tokens: int
    kl: float
    top1: float
    exact: bool
    kv_error: float
    tail_error: float
    res_k: float
    res_v: float
    ehat: float | None
    recompute: float
    """Recomputed tokens x layers ÷ the run's tokens x layers."""
    state_bytes: int
    """Kept for the edge and this run, beyond the source's cache."""
    reference_prefills: int
    """Prefills of this context that only this method needs."""
    seconds: float
    """In the method itself."""
    gate: str
    """"accepted" (also of methods without a gate), or "dense": refused and prefilled densely."""


Progress = Callable[[str], None]
"""Told what is about to be done, once a unit of work: ``units`` says how many there are."""


def units(runs: DenseRuns, settings: EvaluateSettings) -> int:
    """How often ``evaluate`` calls its ``progress``."""
    edges = len(settings.edges)
    return edges * (min(settings.anchors, len(runs.workload.anchors)) + len(runs.workload.tests))


def evaluate(
    runs: DenseRuns,
    settings: EvaluateSettings,
    methods: Sequence[Method] | None = None,
    progress: Progress = lambda what: None,
) -> list[Row]:
    """Rows of all methods, edge by edge and context by context."""
    methods = build_methods(settings.methods, settings.knobs) if methods is None else methods
    rows = []
    for source, destination in settings.edges:
        edge = f"{source}:{destination}"
        anchors = runs.workload.anchors[: settings.anchors]
        for context in anchors:
            progress(f"{edge} anchor {context.id}")
            runs.run(source, context), runs.run(destination, context)
        examples = Examples(tuple(runs.case(source, destination, c) for c in anchors), settings.knobs.rank)
        learned = [method.learned(examples) for method in methods]
        for context in runs.workload.tests:
            progress(f"{edge} {context.id}")
            rows += _rows(edge, context.id, runs.case(source, destination, context), learned)
    return rows


def _rows(edge: str, context: str, case: Case, methods: Sequence[Method]) -> list[Row]:
    outcomes, times = [], []
    for method in methods:
        begun = perf_counter()
        outcomes.append(method.apply(case))
        times.append(perf_counter() - begun)
    none = rotated(case)
    answers = answers_of(case, outcomes)
    rows = []
    for method, outcome, said, seconds in zip(methods, outcomes, answers, times, strict=True):
        held = cache_errors(outcome.run, none, case.dense, outcome.computed)
        rows.append(
            Row(
                edge=edge,
                context=context,
                method=method.name,
                tokens=case.dense.tokens,
                kl=said.kl,
                top1=said.top1,
                exact=said.exact,
                kv_error=held.kv_error,
                tail_error=held.tail_error,
                res_k=held.res_k,
                res_v=held.res_v,
                ehat=outcome.ehat,
                recompute=outcome.recompute,
                state_bytes=outcome.state_bytes,
                reference_prefills=outcome.reference_prefills,
                seconds=seconds,
                gate="accepted" if outcome.accepted else "dense",
            )
        )
    return rows
