"""The edge basis: the few coordinates in which tokens of an edge are compared (design, section 3.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .anchors import Anchor
from .kernels.factorise import leading

DIMENSIONS = 32
_TINY = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class EdgeBasis:
    """``z = ((b - μ)/σ)·U/s`` of a base row ``b = [k | v]``, folded into one affine map a layer, fp32.

    ``s²`` is the sum of the leading eigenvalues, so the pool's own tokens have a mean ``‖z‖²`` of 1 whatever the model.
    Layer 0 is never corrected and stays zero.
    """

    project_k: Tensor
    """``[L, C, d]``."""
    project_v: Tensor
    shift: Tensor
    """``[L, d]``."""
    tokens: Tensor
    """``[L, N, d]``: z of all the pool's tokens, anchor after anchor."""

    @classmethod
    def of(cls, anchors: Sequence[Anchor], dimensions: int = DIMENSIONS) -> "EdgeBasis":
        """Learn the basis of a pool: principal directions of its standardised bases, layer by layer."""
        layers, channels = anchors[0].layers, anchors[0].channels
        count = sum(a.tokens for a in anchors)
        d = min(dimensions, 2 * channels)
        project = torch.zeros(layers, 2 * channels, d)
        shift = torch.zeros(layers, d)
        tokens = torch.zeros(layers, count, d)
        for layer in range(1, layers):
            rows = torch.cat([torch.cat([a.base_k.expand(layer), a.base_v.expand(layer)], 1) for a in anchors])
            deviation, mean = torch.std_mean(rows, dim=0, correction=0)
            # A channel that never varies tells tokens apart by nothing but rounding.
            scale = torch.where(deviation > _TINY, 1 / deviation.clamp_min(_TINY), torch.zeros_like(deviation))
            rows.sub_(mean).mul_(scale)
            directions = leading((rows.mT @ rows)[None], d)[0]
            z = rows @ directions
            size = z.square().sum(1).mean().sqrt().clamp_min(_TINY)
            project[layer, :, : directions.shape[1]] = directions * scale[:, None] / size
            shift[layer] = mean @ project[layer]
            tokens[layer, :, : directions.shape[1]] = z / size
        return cls(project[:, :channels].contiguous(), project[:, channels:].contiguous(), shift, tokens)

    def projection(self, device: torch.device | str) -> "EdgeBasis":
        """The same on a device, without the pool's tokens: all that projecting new ones needs."""
        return EdgeBasis(
            self.project_k.to(device), self.project_v.to(device), self.shift.to(device), self.tokens[:, :0].to(device)
        )

    def z(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """Coordinates fp32 ``[T, d]`` of base rows: position-free ``k`` and ``v``, fp32 ``[T, C]``."""
        return torch.addmm(-self.shift[layer], k, self.project_k[layer]).addmm_(v, self.project_v[layer])
