"""Rotation only, the head alone, and the product's predictors. `attention+head+chosen` is the product's default."""

from dataclasses import dataclass, replace

import torch

from ...choose import choose
from ...config import share_of
from ...gate import Reliability
from ...predict import Predictor
from ..cases import Case, Examples, Outcome, place
from ..dense import Active
from ..partial import partial_run


@dataclass(frozen=True, slots=True)
class Predicted:
    """Rotate, add what a predictor of the edge says; recompute a head, and the tokens that it is least sure of. No
    gate."""

    name: str
    kind: str
    head: int = 0
    """Leading tokens that are recomputed."""
    fraction: float = 0.0
    """Share of the tokens behind the head that are recomputed as well."""
    predictor: Predictor | None = None
    state_bytes: int = 0
    """Of the edge's anchors; of `mean`, of its vectors."""

    def learned(self, examples: Examples) -> "Predicted":
        predictor = examples.predictor(self.kind)
        anchors = sum(a.nbytes for a in examples.pool.anchors)
        return replace(
            self, predictor=predictor, state_bytes=predictor.nbytes if self.kind in ("none", "mean") else anchors
        )

    def apply(self, case: Case) -> Outcome:
        if self.predictor is None:
            raise RuntimeError(f"{self.name} learns from an edge's anchor contexts first")
        source = case.source
        tokens = source.k.shape[1]
        predictor = self.predictor.bind(lambda i: (source.k[i], source.v[i]), case.offsets)
        reliability = Reliability(source.k.shape[0], tokens)
        layers = []
        for i, (k, v) in enumerate(zip(*source, strict=True)):
            prediction = predictor.layer(i, k, v, case.offsets)
            reliability.add(i, prediction, k, v)
            layers.append(prediction)
        run = place(case, [(p.delta_k, p.delta_v) for p in layers], self.head)
        computed = torch.arange(case.head(self.head).tokens if self.head else 0)
        if self.fraction:
            count = share_of(self.fraction, tokens - len(computed))
            chosen = choose(reliability.doubts(), count, len(computed))
            run = _recomputed(case, run, chosen)
            computed = torch.cat([computed, chosen])
        ehat = None if self.kind == "none" else reliability.ehat(computed)
        return Outcome(run, ehat, len(computed) / tokens, self.state_bytes, computed=computed)


def _recomputed(case: Case, run: Active, chosen: torch.Tensor) -> Active:
    """The model over ``chosen`` rows in the corrected cache; the head, exact already, stands in front of them."""
    over = partial_run(case.model, case.prefix, case.run, run)
    over.begin(chosen)
    for layer in range(run.k.shape[0]):
        over.step(layer)
    return over.active
