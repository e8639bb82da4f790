"""The true delta cut to a rank."""

from dataclasses import dataclass

import torch

from ...factors import Factors
from ..cases import Case, Outcome, place
from .base import Untaught


@dataclass(frozen=True, slots=True)
class Oracle(Untaught):
    """The ceiling of every predictor, and the accuracy of an own delta: a run that was seen on this edge before."""

    name: str
    head: int
    rank: int = 32
    dtype: torch.dtype = torch.bfloat16

    def apply(self, case: Case) -> Outcome:
        target = case.model.release(case.dense, case.prefix.tokens)
        k = Factors.of(target.k - case.source.k, self.rank, self.dtype)
        v = Factors.of(target.v - case.source.v, self.rank, self.dtype)
        deltas = [(k.expand(i), v.expand(i)) for i in range(1, k.layers)]
        run = place(case, [(None, None), *deltas], self.head)
        computed = torch.arange(case.head(self.head).tokens if self.head else 0)
        share = len(computed) / len(case.run)
        return Outcome(run, None, share, k.nbytes + v.nbytes, reference_prefills=1, computed=computed)
