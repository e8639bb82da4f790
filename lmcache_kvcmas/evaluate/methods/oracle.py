"""The true delta cut to a rank."""

from dataclasses import dataclass

import torch

from ...factors import Factors
from ..cases import Case, Outcome, head_share, place
from .base import Untaught


@dataclass(frozen=True, slots=True)
class Oracle(Untaught):
    """The ceiling of every predictor, and the accuracy of an own delta: a run that was seen on this edge before."""

    name: str
    head: bool
    rank: int = 32
    dtype: torch.dtype = torch.bfloat16

    def apply(self, case: Case) -> Outcome:
        target = case.model.release(case.dense, case.prefix.tokens)
        k = Factors.of(target.k - case.source.k, self.rank, self.dtype)
        v = Factors.of(target.v - case.source.v, self.rank, self.dtype)
        deltas = [(k.expand(i), v.expand(i)) for i in range(1, k.layers)]
        run = place(case, [(None, None), *deltas], self.head)
        return Outcome(run, None, head_share(case) if self.head else 0.0, k.nbytes + v.nbytes, reference_prefills=1)
