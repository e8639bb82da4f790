"""One vector an edge and layer: the mean delta of all the tokens that the anchors hold (cf. arXiv 2607.21604)."""

import torch
from torch import Tensor

from ..anchors import PoolState
from .base import LayerPrediction, Predictor, ReadLayer


class MeanPredictor:
    """Adds the same mean delta to every token. Costs next to nothing; good with the head recomputed."""

    def __init__(self, pool: PoolState, device: str = "cpu") -> None:
        anchors = pool.anchors
        count = sum(a.tokens for a in anchors)
        layers = range(anchors[0].layers)
        self.version = pool.version
        self._k, self._v = (
            torch.stack([sum((f.expand(i).sum(0) for f in fs), torch.zeros(fs[0].channels)) for i in layers]) / count
            for fs in ([a.delta_k for a in anchors], [a.delta_v for a in anchors])
        )
        spread_k = sum((a.norm2_k.sum(1) for a in anchors), torch.zeros(len(layers))) / count - self._k.square().sum(1)
        spread_v = sum((a.norm2_v.sum(1) for a in anchors), torch.zeros(len(layers))) / count - self._v.square().sum(1)
        self._spread_k, self._spread_v = spread_k.clamp_min(0).to(device), spread_v.clamp_min(0).to(device)
        self._k, self._v = self._k.to(device), self._v.to(device)
        self._mass = torch.tensor([a.tokens / count for a in anchors], device=device)

    @property
    def nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes

    def bind(self, read: ReadLayer, offsets: Tensor) -> Predictor:
        return self

    def layer(self, layer: int, k: Tensor, v: Tensor, offsets: Tensor) -> LayerPrediction:
        if layer == 0:
            return LayerPrediction()
        tokens = k.shape[0]
        return LayerPrediction(
            self._k[layer].expand(tokens, -1),
            self._v[layer].expand(tokens, -1),
            self._spread_k[layer].expand(tokens),
            self._spread_v[layer].expand(tokens),
            self._mass,
        )
