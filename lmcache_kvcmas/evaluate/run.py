"""Every method on every test context of every edge."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..anchors import Caches
from ..predict import PREDICTORS, Predictor, build_predictor
from .measures import AnswerErrors, answer_errors, cache_errors
from .methods import Case, Method, Outcome, default_methods, place
from .runs import ANSWER_TOKENS, DenseRuns
from .workload import Context


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    edges: tuple[tuple[str, str], ...]
    anchors: int = 10
    rank: int = 32
    head: int = 32


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
    methods = default_methods(settings.rank) if methods is None else methods
    rows = []
    for source, destination in settings.edges:
        edge = f"{source}:{destination}"
        anchors = runs.workload.anchors[: settings.anchors]
        for context in anchors:
            progress(f"{edge} anchor {context.id}")
            runs.run(source, context), runs.run(destination, context)
        pool = runs.pool(source, destination, anchors, settings.rank)
        predictors = {name: build_predictor(name, pool) for name in PREDICTORS}
        for context in runs.workload.tests:
            progress(f"{edge} {context.id}")
            case = case_of(runs, destination, context, runs.free(source, context), predictors)
            rows += _rows(runs, edge, destination, context, case, methods)
    return rows


def case_of(
    runs: DenseRuns, destination: str, context: Context, source: Caches, predictors: Mapping[str, Predictor]
) -> Case:
    """The transition from ``source``, a position-free cache of the context's run, to the destination agent."""
    return Case(
        model=runs.model,
        source=source,
        prefix=runs.prefix(destination),
        run=runs.prompt(destination, context).run,
        head=runs.head(destination, context),
        predictors=predictors,
        dense=runs.run(destination, context),
    )


def answers_of(runs: DenseRuns, destination: str, context: Context, outcomes: Sequence[Outcome]) -> list[AnswerErrors]:
    """What the model says on top of each outcome, against dense. One batch: the caches differ, the tokens do not."""
    answer = runs.answer(destination, context)
    forced = [*runs.prompt(destination, context).suffix, *answer.tokens[:-1]]
    prefix = runs.prefix(destination)
    logps = runs.model.compare([prefix.then(o.run) for o in outcomes], forced, ANSWER_TOKENS)
    return [answer_errors(logp, answer.logp) for logp in logps]


def _rows(
    runs: DenseRuns, edge: str, destination: str, context: Context, case: Case, methods: Sequence[Method]
) -> list[Row]:
    outcomes = [method.apply(case) for method in methods]
    none = place(case, [(None, None)] * case.source.k.shape[0], head=False)
    answers = answers_of(runs, destination, context, outcomes)
    rows = []
    for method, outcome, said in zip(methods, outcomes, answers, strict=True):
        held = cache_errors(outcome.run, none, case.dense, case.head.tokens)
        rows.append(
            Row(
                edge=edge,
                context=context.id,
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
            )
        )
    return rows
