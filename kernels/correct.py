"""One layer's step from a source agent's cache to a destination agent's: unrotate, add the delta, rotate.

The torch reference that every faster form is tested against. Written for streaming: one layer at a time, so that a
caller never holds more than a layer of deltas.
"""

import torch
from torch import Tensor

from .rope import RopeTable


def release(rope: RopeTable, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Position-free keys, fp32 ``[T, C]``, of cached keys ``k [T, C]`` that stand at the positions of (cos, sin)."""
    return rope.rotate(k.float(), cos, sin, inverse=True)


def correct(
    rope: RopeTable,
    k_free: Tensor,
    v: Tensor,
    delta_k: Tensor | None,
    delta_v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Corrected ``(k, v)``, each ``[T, C]``, for the destination positions of (cos, sin).

    ``k_free`` is position-free; a delta is fp32 ``[T, C]`` or None for "nothing to add". Sums and rotations are fp32,
    the result is in ``dtype`` (``v``'s by default). A value that overflows ``dtype`` becomes infinite, as a cast does.
    """
    dtype = v.dtype if dtype is None else dtype
    keys = k_free.float() if delta_k is None else delta_k + k_free
    values = v if delta_v is None else delta_v + v
    return rope.rotate(keys, cos, sin).to(dtype), values.to(dtype)
