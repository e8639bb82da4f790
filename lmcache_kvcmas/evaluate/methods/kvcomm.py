"""KVComm (arXiv 2510.12872): offsets from the context prefilled alone, kept at full width."""

from dataclasses import dataclass, replace

import torch

from ...anchors import AnchorPool
from ..cases import Case, Examples, Outcome, place, pool_of, refused, served_bytes
from .anchored import entropy_accepts, mixed_deltas

_WHOLE = 1 << 30


@dataclass(frozen=True, slots=True)
class KVComm:
    """Every context is prefilled alone; anchors hold such a base and its full-width offset to the destination's.

    γ = 0.3 and at most 20 anchors, as published. The text behind the context is not corrected here: whatever the
    method, the destination's instruction is prefilled on top of the run. Chosen: anchors in bf16 (a stored cache's
    dtype); of more contexts than fit, the first ones, since eviction plays no part on a fixed list.
    """

    name: str = "kvcomm"
    gamma: float = 0.3
    capacity: int = 20
    dtype: torch.dtype = torch.bfloat16
    pool: AnchorPool | None = None

    def learned(self, examples: Examples) -> "KVComm":
        return replace(self, pool=pool_of(examples.cases[: self.capacity], _WHOLE, _WHOLE, self.dtype, alone=True))

    def apply(self, case: Case) -> Outcome:
        if self.pool is None:
            raise RuntimeError("kvcomm learns from an edge's anchor contexts first")
        base = case.alone()
        state = sum(a.nbytes for a in self.pool.anchors) + served_bytes(base)
        if not entropy_accepts(base.v, self.pool.anchors, self.gamma):
            return refused(case, state, reference_prefills=1)
        run = place(case, mixed_deltas(base, self.pool, case.offsets), base=base)
        return Outcome(run, state_bytes=state, reference_prefills=1)
