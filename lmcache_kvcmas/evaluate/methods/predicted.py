"""Rotation only, the head alone, and the product's predictors. `attention+head` is the product's default."""

from dataclasses import dataclass, replace

import torch

from ...gate import Reliability
from ...predict import build_predictor
from ..cases import Case, Examples, Outcome, head_share, place


@dataclass(frozen=True, slots=True)
class Predicted:
    """Rotate, add what a predictor of the edge says, and recompute the head if asked to. No gate."""

    name: str
    predictor: str
    head: bool
    state_bytes: int = 0
    """Of the edge's anchors; of `mean`, of its vectors."""

    def learned(self, examples: Examples) -> "Predicted":
        if self.predictor in ("none", "mean"):
            return replace(self, state_bytes=build_predictor(self.predictor, examples.pool).nbytes)
        return replace(self, state_bytes=sum(a.nbytes for a in examples.pool.anchors))

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
        ehat = None if self.predictor == "none" else reliability.ehat
        return Outcome(run, ehat, head_share(case) if self.head else 0.0, self.state_bytes)
