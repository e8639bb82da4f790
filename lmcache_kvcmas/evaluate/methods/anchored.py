"""What KVComm and KVCMAS share: weights per token position over anchors, and a gate on their entropy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...anchors import Anchor, AnchorPool, Caches
from ...predict.paper import PaperPredictor
from ..cases import Deltas


def mixed_deltas(base: Caches, pool: AnchorPool, offsets: torch.Tensor) -> Deltas:
    """Deltas of a run whose position-free cache is ``base``, layer by layer; nothing for layer 0, or of no anchors."""
    if not len(pool):
        return [(None, None)] * base.k.shape[0]
    bound = PaperPredictor(pool.state).bind(lambda i: (base.k[i], base.v[i]), offsets)
    layers = [bound.layer(i, k, v, offsets) for i, (k, v) in enumerate(zip(*base, strict=True))]
    return [(p.delta_k, p.delta_v) for p in layers]


def entropy_accepts(values: Tensor, anchors: Sequence[Anchor], gamma: float, minimum: int = 2) -> bool:
    """Whether the anchors' shares for a run of ``values [L, T, C]`` are sharp: entropy ≤ γ·log2 of their number.

    Shares are the softmax of minus the L2 distance over all layers, tokens and channels at once, to each anchor that is
    at least as long. The pool must hold ``minimum``. Not published is what happens where one anchor or none is long
    enough; chosen: accepted, because a lone share has no entropy and a method for that case (the longest) exists.
    """
    tokens = values.shape[1]
    if len(anchors) < minimum:
        return False
    long = [a for a in anchors if a.tokens >= tokens]
    if len(long) < 2:
        return True
    distance2 = torch.zeros(len(long), dtype=torch.float64)
    for j, anchor in enumerate(long):
        for layer in range(values.shape[0]):
            distance2[j] += (values[layer] - anchor.base_v.expand(layer, slice(0, tokens))).double().square().sum()
    logp = torch.log_softmax(-distance2.sqrt(), 0)
    entropy = -(logp.exp() * logp).nan_to_num().sum() / torch.log(torch.tensor(2.0))
    return bool(entropy <= gamma * torch.log2(torch.tensor(float(len(long)))))
