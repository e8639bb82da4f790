"""One transition from a source agent's cache to a destination agent's: what a method is given, and what it returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch

from ..anchors import Anchor, AnchorPool, Caches
from ..kernels.correct import correct
from ..predict import Predictor, build_predictor
from .dense import Active, Answer, DenseModel
from .measures import AnswerErrors, answer_errors

_BATCH = 9  # caches compared at a time: twenty of a long run would need gigabytes

Deltas = Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]
"""One layer after another: what is added to position-free keys and to values, fp32 ``[T, C]``, or None for nothing."""


@dataclass(frozen=True, eq=False)
class Case:
    """One transition: everything that a method may use, and the dense truth that only an oracle may look at.

    Methods that keep something of this very run from an earlier dense prefill (``Outcome.reference_prefills`` says so)
    take it from ``dense`` too; so does everyone who falls back. Whatever costs a forward is computed when asked for.
    """

    model: DenseModel
    source: Caches
    """Position-free cache of the run, as the source agent's really is."""
    prefix: Active
    """What stands in front of the run at the destination."""
    run: list[int]
    suffix: list[int]
    """What follows the run in the destination's prompt."""
    dense_of: Callable[[], Active]
    head_of: Callable[[int], Active]
    alone_of: Callable[[], Caches]
    answer_of: Callable[[], Answer]
    fallback_of: Callable[[], Active] | None = None
    """What dense prefill gives behind this very prefix; None where the prefix is exact, and that is the truth."""
    begins: bool = True
    """Whether what stands in front of the run was not taken over with it: only then does it have a head."""
    error2: float = 0.0
    """Σ ê² along the hops that the source's cache went through."""
    offset: int = 0
    """Tokens between the start of the edge's slot and the run."""
    kind: str = ""
    """What sort of text the run is, `Context.kind`."""
    source_prefix: Active | None = None
    """What stands in front of the run at the source; None where that is not known."""

    @property
    def dense(self) -> Active:
        """The truth: the run as it is when all of the destination's prompt is prefilled densely."""
        return self.dense_of()

    @property
    def fallback(self) -> Active:
        """The run as the model computes it behind the prefix."""
        return self.dense if self.fallback_of is None else self.fallback_of()

    def head(self, tokens: int) -> Active:
        """The run's first ``tokens``, recomputed exactly; all of a run of at most 64."""
        if not (self.begins and tokens):
            return self.prefix.rows(0, 0)
        return self.head_of(min(tokens, len(self.run)) if len(self.run) > 64 else len(self.run))

    @property
    def answer(self) -> Answer:
        """What the destination says when all of its prompt is dense."""
        return self.answer_of()

    @property
    def offsets(self) -> torch.Tensor:
        """int64 ``[T]``: the ``t`` of the predictors."""
        return torch.arange(self.offset, self.offset + len(self.run))

    def alone(self) -> Caches:
        """Position-free cache of the run prefilled with nothing in front."""
        return self.alone_of()


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
    computed: torch.Tensor | None = None
    """int64, rows that went through all layers; ê speaks of the others."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Transitions of one edge that methods learn from, and what the product learns from them: shared by its methods."""

    cases: tuple[Case, ...]
    rank: int = 32
    keep: int = 256
    dtype: torch.dtype = torch.bfloat16

    @cached_property
    def pool(self) -> AnchorPool:
        return pool_of(self.cases, self.rank, self.keep, self.dtype)

    @cached_property
    def predictor(self) -> Callable[[str], Predictor]:
        """The pool's predictor of a name, built once."""
        return cache(lambda name: build_predictor(name, self.pool))


def pool_of(
    cases: Sequence[Case], rank: int = 32, keep: int = 256, dtype: torch.dtype = torch.bfloat16, alone: bool = False
) -> AnchorPool:
    """The pool that dense prefills of both agents give: ``keep`` tokens of each run, in ``dtype``. With ``alone``, of
    the differences to the run prefilled with nothing in front."""
    pool = AnchorPool(max(1, len(cases)))
    for case in cases:
        base, target = case.alone() if alone else case.source, case.model.release(case.dense, case.prefix.tokens)
        delta = Caches(target.k - base.k, target.v - base.v)
        pool.add(Anchor.learn(base, delta, rank, keep, case.offset, dtype))
    return pool


def answers_of(case: Case, outcomes: Sequence[Outcome]) -> list[AnswerErrors]:
    """What the model says on top of each outcome, against dense. In batches: the caches differ, the tokens do not."""
    answer = case.answer
    forced = [*case.suffix, *answer.tokens[:-1]]
    pasts = [case.prefix.then(o.run) for o in outcomes]
    batches = (pasts[i : i + _BATCH] for i in range(0, len(pasts), _BATCH))
    logps = (logp for batch in batches for logp in case.model.compare(batch, forced, len(answer.tokens)))
    return [answer_errors(logp, answer.logp) for logp in logps]


def place(case: Case, deltas: Deltas, head: int = 0, base: Caches | None = None) -> Active:
    """Move a run behind the destination's prefix, a delta added to each layer, ``head`` tokens recomputed.

    ``base`` is a position-free cache of the run: the source's, if none is given.
    """
    base = case.source if base is None else base
    start = case.prefix.tokens
    cos, sin = case.model.rope.span(start, start + base.k.shape[1])
    layers = zip(*base, deltas, strict=True)
    moved = [correct(case.model.rope, k, v, dk, dv, cos, sin) for k, v, (dk, dv) in layers]
    run = Active(torch.stack([k for k, _ in moved]), torch.stack([v for _, v in moved]))
    if not head:
        return run
    exact = case.head(head)
    return exact.then(run.rows(exact.tokens, run.tokens))


def rotated(case: Case) -> Active:
    """The source's run, moved and nothing else."""
    return place(case, [(None, None)] * case.source.k.shape[0])


def refused(case: Case, state_bytes: int, reference_prefills: int = 0, ehat: float | None = None) -> Outcome:
    """A gate's no: the run as dense prefill gives it, at the price of dense prefill."""
    return Outcome(case.fallback, ehat, 1.0, state_bytes, reference_prefills, accepted=False)


def served_bytes(caches: Caches) -> int:
    """Bytes of a cache as an engine holds it, 2 a number (it is fp32 here)."""
    return 2 * (caches.k.numel() + caches.v.numel())
