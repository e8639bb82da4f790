"""The published form of the prediction (KVCMAS, arXiv 2609.34060; KVComm, arXiv 2510.12872), reconstructed.

Position by position: the token at position t of a run is compared with the tokens at the same position of the anchors
that are at least as long as the run (or with the longest anchor, when all are shorter; what is beyond its end is left
as it is). Weights are the softmax at temperature 1, over anchors, of minus the mean over layers and channels of
``|base − anchor base|``; K and V apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..anchors import Anchor, PoolState
from ..factors import Factors
from .base import LayerPrediction, Predictor, ReadLayer


class PaperPredictor:
    """Weights per token position over anchors, from all layers at once: ``bind`` it to a run first."""

    def __init__(self, pool: PoolState, device: str = "cpu") -> None:
        self.version = pool.version
        self._device = device
        self._anchors = pool.anchors

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._anchors)

    def bind(self, read: ReadLayer, offsets: Tensor) -> "_BoundPaperPredictor":
        last = int(offsets[-1])
        ends = [int(a.offsets[-1]) for a in self._anchors]
        used = [i for i, end in enumerate(ends) if end >= last] or [max(range(len(ends)), key=ends.__getitem__)]
        anchors = [self._anchors[i] for i in used]
        cpu_offsets = offsets.to("cpu", torch.int32)
        rows = [_same_position(a, cpu_offsets) for a in anchors]
        covered = cpu_offsets <= max(ends[i] for i in used)
        distance = torch.zeros(2, len(cpu_offsets), len(used), device=self._device)
        layers = self._anchors[0].layers
        for layer in range(layers):
            k, v = read(layer)
            for j, (anchor, row) in enumerate(zip(anchors, rows, strict=True)):
                distance[0, :, j] += (k - _rows(anchor.base_k, layer, row).to(k.device)).abs_().mean(1)
                distance[1, :, j] += (v - _rows(anchor.base_v, layer, row).to(v.device)).abs_().mean(1)
        weights = torch.softmax(-distance / layers, 2) * covered.to(self._device)[None, :, None]
        return _BoundPaperPredictor(self.version, len(self._anchors), used, anchors, rows, weights)

    def layer(self, layer: int, k: Tensor, v: Tensor, offsets: Tensor) -> LayerPrediction:
        raise RuntimeError("the paper predictor's weights depend on all layers: bind() it to the run first")


@dataclass(frozen=True, slots=True, eq=False)
class _BoundPaperPredictor:
    version: int
    pool_size: int
    used: list[int]
    anchors: list[Anchor]
    rows: list[Tensor]
    weights: Tensor
    """``[2, T, used]``: for K, for V."""

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def bind(self, read: ReadLayer, offsets: Tensor) -> Predictor:
        return self

    def layer(self, layer: int, k: Tensor, v: Tensor, offsets: Tensor) -> LayerPrediction:
        if layer == 0:
            return LayerPrediction()
        device = k.device
        delta_k, spread_k = self._mix([a.delta_k for a in self.anchors], [a.norm2_k for a in self.anchors], layer, 0)
        delta_v, spread_v = self._mix([a.delta_v for a in self.anchors], [a.norm2_v for a in self.anchors], layer, 1)
        mass = torch.zeros(self.pool_size, device=device)
        mass[torch.tensor(self.used, device=device)] = self.weights.mean((0, 1))
        return LayerPrediction(delta_k, delta_v, spread_k, spread_v, mass)

    def _mix(self, deltas: list[Factors], norms2: list[Tensor], layer: int, which: int) -> tuple[Tensor, Tensor]:
        weights = self.weights[which]
        mixed = torch.zeros(weights.shape[0], deltas[0].channels, device=weights.device)
        squares = torch.zeros(weights.shape[0], device=weights.device)
        for j, (delta, norm2, row) in enumerate(zip(deltas, norms2, self.rows, strict=True)):
            mixed.addcmul_(weights[:, j, None], _rows(delta, layer, row).to(weights.device))
            squares.addcmul_(weights[:, j], norm2[layer, row].to(weights.device))
        return mixed, (squares - mixed.square().sum(1)).clamp_min_(0)


def _same_position(anchor: Anchor, offsets: Tensor) -> Tensor:
    """Rows of the anchor that stand at the given offsets: the nearest one kept, where not all were."""
    right = torch.searchsorted(anchor.offsets, offsets).clamp_max_(anchor.tokens - 1)
    left = (right - 1).clamp_min_(0)
    nearer_left = (offsets - anchor.offsets[left]).abs() <= (anchor.offsets[right] - offsets).abs()
    return torch.where(nearer_left, left, right)


def _rows(factors: Factors, layer: int, rows: Tensor) -> Tensor:
    u = factors.u[layer, rows.to(factors.u.device)].float()
    return u if factors.v is None else u @ factors.v[layer].float()
