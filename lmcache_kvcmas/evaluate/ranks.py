"""How many directions deltas and bases really have, layer by layer: what a rank is chosen by."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .cases import Case


def effective_ranks(cases: Sequence[Case]) -> dict[str, list[float]]:
    """exp of the entropy of the squared singular values' shares, mean over ``cases``; 0 where there is nothing."""
    ranks = torch.zeros(4, cases[0].source.k.shape[0])
    for case in cases:
        base, target = case.source, case.model.release(case.dense, case.prefix.tokens)
        parts = (target.k - base.k, target.v - base.v, base.k, base.v)
        ranks += torch.stack([torch.stack([_effective_rank(x) for x in part]) for part in parts]) / len(cases)
    return dict(zip(("delta_k", "delta_v", "base_k", "base_v"), ranks.tolist(), strict=True))


def _effective_rank(x: Tensor) -> Tensor:
    """Of ``[T, C]``."""
    energy = torch.linalg.svdvals(x.double()).square()
    if float(energy.sum()) <= 1e-12:
        return torch.zeros(())
    share = energy / energy.sum()
    return torch.exp(-(share * share.clamp_min(1e-300).log()).sum()).float()
