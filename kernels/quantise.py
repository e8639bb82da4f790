"""Eight-bit codes of cached keys and values, one scale for each token and head.

Both are symmetric and need no calibration. ``int8`` is off by at most half a step, ``amax / 254``, everywhere in a row
of ``D`` channels. ``fp8`` (E4M3: 3 mantissa bits, 2^-6 its smallest normal number; OCP's 8-bit floating point
specification, revision 1.0) is off by at most ``|x| / 16``, or ``amax / 448 / 1024`` where that is more: finer than
int8 near zero, coarser elsewhere.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn

_INT8_MAX = 127.0
_FP8_MAX = 448.0
# A scale below fp32's smallest normal number has too few bits, and some devices read it as zero.
_SMALLEST = torch.finfo(torch.float32).tiny


def quantise_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 ``[L, T, H, D]`` in -127..127, and scales fp32 ``[L, T, H]``, of ``x [L, T, H, D]``.

    A row (one token and head) without energy, less than 2e-36, has scale 0; one with a value that is not finite has
    scale NaN and comes back as NaN, all of it. No row has an influence on another.
    """
    steps, scale = _steps(x, _INT8_MAX)
    return steps.round_().to(torch.int8), scale


def quantise_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn ``[L, T, H, D]``, none NaN, and scales fp32 ``[L, T, H]``; else as `quantise_int8`."""
    steps, scale = _steps(x, _FP8_MAX)
    return steps.to(FP8), scale


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``codes [L, T, H, D]`` times ``scale [L, T, H]``, in ``dtype``: finite wherever both are."""
    largest = torch.finfo(dtype).max
    return (codes.float() * scale[..., None]).clamp_(-largest, largest).to(dtype)


def _steps(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """``x`` in units of its rows' scales, fp32 within ±``largest``, and the scales."""
    x = x.float()
    scale = x.abs().amax(-1) / largest
    finite = torch.isfinite(scale)
    kept = finite & (scale >= _SMALLEST)
    # Not a product with 1/scale: a division rounds once, and alike everywhere.
    steps = x / torch.where(kept, scale, 1.0)[..., None]
    steps = torch.where(kept[..., None], steps, 0.0).clamp_(-largest, largest)
    return steps, torch.where(kept, scale, torch.where(finite, 0.0, torch.nan))
