"""Rotation only: what every correction is compared with."""

from torch import Tensor

from ..anchors import PoolState
from .base import LayerPrediction, Predictor, ReadLayer


class NonePredictor:
    """Adds nothing."""

    nbytes = 0

    def __init__(self, pool: PoolState, device: str = "cpu") -> None:
        self.version = pool.version

    def bind(self, read: ReadLayer, offsets: Tensor) -> Predictor:
        return self

    def layer(self, layer: int, k: Tensor, v: Tensor, offsets: Tensor) -> LayerPrediction:
        return LayerPrediction()
