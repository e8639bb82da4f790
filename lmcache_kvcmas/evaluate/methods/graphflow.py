"""GraphFlow's state management (arXiv 2605.22566): one base without prefix, a sparse residual for each prefix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cases import Case, Outcome, place, served_bytes
from .base import Untaught


@dataclass(frozen=True, slots=True)
class GraphFlow(Untaught):
    """The run prefilled alone, plus the largest numbers of its true residual at the destination.

    This is a pair that was seen: the residual is of this very context, from a dense prefill that was done once. For a
    pair that was not seen nothing is published but dense prefill. More than 75% of key and 70% of value residuals are
    reported to be near zero; chosen: those shares are dropped, by magnitude in each layer (not layer 0, which has no
    residual). Path pruning has nothing to prune on one edge. Bytes: base and kept numbers in bf16, one bit a position.
    """

    name: str = "graphflow"
    drop_k: float = 0.75
    drop_v: float = 0.70
    dtype: torch.dtype = torch.bfloat16

    def apply(self, case: Case) -> Outcome:
        base = case.alone()
        target = case.model.release(case.dense, case.prefix.tokens)
        deltas: list[tuple[Tensor | None, Tensor | None]] = [(None, None)]
        state = served_bytes(base)
        for layer in range(1, base.k.shape[0]):
            k = self._sparse(target.k[layer] - base.k[layer], self.drop_k)
            v = self._sparse(target.v[layer] - base.v[layer], self.drop_v)
            deltas.append((k, v))
            for x in (k, v):
                state += self.dtype.itemsize * int(x.count_nonzero()) + -(-x.numel() // 8)
        return Outcome(place(case, deltas, base=base), state_bytes=state, reference_prefills=2)

    def _sparse(self, residual: Tensor, drop: float) -> Tensor:
        """fp32, with the smallest ``drop`` of its numbers zero and the others rounded to the stored dtype."""
        dropped = int(drop * residual.numel())
        if dropped:
            threshold = residual.abs().flatten().kthvalue(dropped).values
            residual = residual * (residual.abs() > threshold)
        return residual.to(self.dtype).float()
