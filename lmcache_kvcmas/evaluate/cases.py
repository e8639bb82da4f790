"""One transition from a source agent's cache to a destination agent's: what a method is given, and what it returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..anchors import AnchorPool, Caches
from ..kernels.correct import correct
from ..predict import PREDICTORS, Predictor, build_predictor
from .dense import Active, DenseModel
from .measures import AnswerErrors, answer_errors
from .runs import ANSWER_TOKENS, DenseRuns
from .workload import Context

_BATCH = 9  # caches compared at a time: twenty of a long run would need gigabytes

Deltas = Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]
"""One layer after another: what is added to position-free keys and to values, fp32 ``[T, C]``, or None for nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One transition: everything that a method may use, and the dense truth that only an oracle may look at.

    Methods that keep something of this very run from an earlier dense prefill (``Outcome.reference_prefills`` says so)
    take it from ``dense`` too; so does everyone who falls back.
    """

    model: DenseModel
    source: Caches
    """Position-free cache of the run, as the source agent's really is."""
    prefix: Active
    """The destination's own prefix, exact."""
    run: list[int]
    head: Active
    """The run's first tokens, recomputed exactly."""
    predictors: Mapping[str, Predictor]
    """Of this edge, by name."""
    dense: Active
    """The truth: the run as dense prefill of the destination gives it."""
    alone: Callable[[], Caches]
    """Position-free cache of the run prefilled with nothing in front, computed when asked for."""
    source_prefix: Active | None = None
    """What stands in front of the run at the source; None where that is not known."""


class Outcome(NamedTuple):
    run: Active
    """The run's cache at the destination's positions."""
    ehat: float | None = None
    """Estimated relative error of the rows that are not recomputed; None where a method has no such estimate."""
    recompute: float = 0.0
    """Recomputed tokens x layers ÷ the run's tokens x layers."""
    state_bytes: int = 0
    """Kept for the edge and for this run, beyond the source's cache."""
    reference_prefills: int = 0
    """Prefills of this very context that only this method needs: alone, or once densely at the destination."""
    accepted: bool = True
    """False: the method's own gate refused, and the run was prefilled densely."""


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """An edge's anchor contexts, and the dense runs of both agents on them."""

    runs: DenseRuns
    source: str
    destination: str
    contexts: tuple[Context, ...]
    pool: AnchorPool
    """What the product learns from them."""

    def predictors(self) -> dict[str, Predictor]:
        return {name: build_predictor(name, self.pool) for name in PREDICTORS}

    def case(self, context: Context, predictors: Mapping[str, Predictor]) -> Case:
        """The edge's transition on ``context``."""
        source = self.runs.free(self.source, context)
        return case_of(self.runs, self.destination, context, source, predictors, self.source)


def case_of(
    runs: DenseRuns,
    destination: str,
    context: Context,
    source: Caches,
    predictors: Mapping[str, Predictor],
    role: str | None = None,
) -> Case:
    """The transition from ``source``, a position-free cache of the context's run (``role``'s), to the destination."""
    return Case(
        model=runs.model,
        source=source,
        prefix=runs.prefix(destination),
        run=runs.prompt(destination, context).run,
        head=runs.head(destination, context),
        predictors=predictors,
        dense=runs.run(destination, context),
        alone=lambda: runs.alone(context),
        source_prefix=None if role is None else runs.prefix(role),
    )


def answers_of(runs: DenseRuns, destination: str, context: Context, outcomes: Sequence[Outcome]) -> list[AnswerErrors]:
    """What the model says on top of each outcome, against dense. In batches: the caches differ, the tokens do not."""
    answer = runs.answer(destination, context)
    forced = [*runs.prompt(destination, context).suffix, *answer.tokens[:-1]]
    pasts = [runs.prefix(destination).then(o.run) for o in outcomes]
    batches = (pasts[i : i + _BATCH] for i in range(0, len(pasts), _BATCH))
    logps = (logp for batch in batches for logp in runs.model.compare(batch, forced, ANSWER_TOKENS))
    return [answer_errors(logp, answer.logp) for logp in logps]


def place(case: Case, deltas: Deltas, head: bool, base: Caches | None = None) -> Active:
    """Move a run behind the destination's prefix, a delta added to each layer, the head replaced.

    ``base`` is a position-free cache of the run: the source's, if none is given.
    """
    base = case.source if base is None else base
    start = case.prefix.tokens
    cos, sin = case.model.rope.span(start, start + base.k.shape[1])
    layers = zip(*base, deltas, strict=True)
    moved = [correct(case.model.rope, k, v, dk, dv, cos, sin) for k, v, (dk, dv) in layers]
    run = Active(torch.stack([k for k, _ in moved]), torch.stack([v for _, v in moved]))
    return case.head.then(run.rows(case.head.tokens, run.tokens)) if head else run


def rotated(case: Case) -> Active:
    """The source's run, moved and nothing else."""
    return place(case, [(None, None)] * case.source.k.shape[0], head=False)


def head_share(case: Case) -> float:
    """``Outcome.recompute`` of a recomputed head."""
    return min(case.head.tokens, case.dense.tokens) / case.dense.tokens


def refused(case: Case, state_bytes: int, reference_prefills: int = 0, ehat: float | None = None) -> Outcome:
    """A gate's no: the run as dense prefill gives it, at the price of dense prefill."""
    return Outcome(case.dense, ehat, 1.0, state_bytes, reference_prefills, accepted=False)


def served_bytes(caches: Caches) -> int:
    """Bytes of a cache as an engine holds it, 2 a number (it is fp32 here)."""
    return 2 * (caches.k.numel() + caches.v.numel())
