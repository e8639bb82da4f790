"""Ways to turn a source agent's cache of a run into the destination agent's: small classes, listed at the end."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ..anchors import Caches
from ..factors import Factors
from ..gate import Reliability
from ..kernels.correct import correct
from ..predict import Predictor
from .dense import Active, DenseModel


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One transition: everything that a method may use, and the dense truth that only an oracle may look at."""

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


class Outcome(NamedTuple):
    run: Active
    """The run's cache at the destination's positions."""
    ehat: float | None
    """Estimated relative error of the rows that are not recomputed; None where a method has no such estimate."""


class Method(Protocol):
    @property
    def name(self) -> str: ...

    def apply(self, case: Case) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Predicted:
    """Rotate, add what a predictor of the edge says, and recompute the head if asked to."""

    name: str
    predictor: str
    head: bool

    def apply(self, case: Case) -> Outcome:
        source = case.source
        tokens = source.k.shape[1]
        offsets = torch.arange(tokens)
        predictor = case.predictors[self.predictor].bind(lambda i: (source.k[i], source.v[i]), offsets)
        start = min(case.head.tokens, tokens) if self.head else 0
        reliability = Reliability(source.k.shape[0])
        layers = []
        for i, (k, v) in enumerate(zip(*source, strict=True)):
            prediction = predictor.layer(i, k, v, offsets)
            reliability.add(i, prediction, k, v, start)
            layers.append(prediction)
        run = place(case, [(p.delta_k, p.delta_v) for p in layers], self.head)
        return Outcome(run, None if self.predictor == "none" else reliability.ehat)


@dataclass(frozen=True, slots=True)
class Oracle:
    """The true delta cut to a rank: the ceiling of every predictor, and the accuracy of an own delta."""

    name: str
    head: bool
    rank: int = 32
    dtype: torch.dtype = torch.bfloat16

    def apply(self, case: Case) -> Outcome:
        target = case.model.release(case.dense, case.prefix.tokens)
        k = Factors.of(target.k - case.source.k, self.rank, self.dtype)
        v = Factors.of(target.v - case.source.v, self.rank, self.dtype)
        deltas = [(k.expand(i), v.expand(i)) for i in range(1, k.layers)]
        return Outcome(place(case, [(None, None), *deltas], self.head), None)


def place(case: Case, deltas: list[tuple[torch.Tensor | None, torch.Tensor | None]], head: bool) -> Active:
    """Move the source's run behind the destination's prefix, a delta added to each layer, the head replaced."""
    start = case.prefix.tokens
    cos, sin = case.model.rope.span(start, start + case.source.k.shape[1])
    layers = zip(*case.source, deltas, strict=True)
    moved = [correct(case.model.rope, k, v, dk, dv, cos, sin) for k, v, (dk, dv) in layers]
    run = Active(torch.stack([k for k, _ in moved]), torch.stack([v for _, v in moved]))
    return case.head.then(run.rows(case.head.tokens, run.tokens)) if head else run


def default_methods(rank: int = 32) -> tuple[Method, ...]:
    """What `kvcmas evaluate` compares. ``attention+head`` is the product's default."""
    return (
        Predicted("none", "none", False),
        Predicted("head", "none", True),
        Predicted("paper", "paper", False),
        Predicted("paper+head", "paper", True),
        Predicted("mean+head", "mean", True),
        Predicted("attention", "attention", False),
        Predicted("attention+head", "attention", True),
        Oracle("oracle", False, rank),
        Oracle("oracle+head", True, rank),
    )
