"""What every predictor is."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

ReadLayer = Callable[[int], tuple[Tensor, Tensor]]
"""Gives a run's position-free ``k`` and its ``v``, fp32 ``[T, C]``, of one layer."""


class LayerPrediction(NamedTuple):
    """One layer's predicted delta of ``T`` tokens, from ``A`` anchors."""

    delta_k: Tensor | None = None
    """fp32 ``[T, C]``, to be added to position-free keys; None for nothing to add."""
    delta_v: Tensor | None = None
    spread_k: Tensor | None = None
    """fp32 ``[T]``: Σ_j a‖δ_j‖² − ‖Σ_j a δ_j‖², how much the anchors that were mixed disagree. None like the deltas."""
    spread_v: Tensor | None = None
    mass: Tensor | None = None
    """fp32 ``[A]``, sums to 1: each anchor's share of this layer's weights."""


class Predictor(Protocol):
    """Predicts layer by layer, so that a caller never holds more than one layer of deltas."""

    @property
    def version(self) -> int:
        """Version of the pool it was built from, for ``AnchorPool.credit``."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of what was computed ahead from the pool."""
        ...

    def bind(self, read: ReadLayer, offsets: Tensor) -> "Predictor":
        """The predictor of one run. Only `paper`, whose weights depend on all layers, returns another than itself."""
        ...

    def layer(self, layer: int, k: Tensor, v: Tensor, offsets: Tensor) -> LayerPrediction:
        """Predict layer ``layer`` of a run: position-free ``k`` and ``v``, fp32 ``[T, C]``; ``offsets [T]`` integers.

        Layer 0 has nothing to add: what stands in front of a token does not reach it.
        """
        ...
