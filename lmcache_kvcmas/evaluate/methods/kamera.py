"""Kamera (arXiv 2606.23581): a position-free chunk, re-rotated exactly, with a low-rank conditioning patch."""

from dataclasses import dataclass

import torch

from ...factors import Factors
from ..cases import Case, Outcome, place, served_bytes
from .base import Untaught


@dataclass(frozen=True, slots=True)
class Kamera(Untaught):
    """The run prefilled alone, plus its true delta at the destination cut to rank m.

    This is a chunk whose patch exists: it comes from a dense prefill of this very context behind this prefix, done
    once; the patch is then what is kept. Chosen: m = 32 as for the other low-rank methods, keys and values apart, all
    layers but 0, which needs none, factors in bf16.
    """

    name: str = "kamera"
    rank: int = 32
    dtype: torch.dtype = torch.bfloat16

    def apply(self, case: Case) -> Outcome:
        base = case.alone()
        target = case.model.release(case.dense, case.prefix.tokens)
        k, v = (Factors.of((b - a)[1:], self.rank, self.dtype) for a, b in zip(base, target, strict=True))
        deltas = [(k.expand(i), v.expand(i)) for i in range(k.layers)]
        state = k.nbytes + v.nbytes + served_bytes(base)
        return Outcome(place(case, [(None, None), *deltas], base=base), state_bytes=state, reference_prefills=2)
