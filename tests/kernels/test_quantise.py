"""Eight-bit codes. Worse here, every chunk that a lossy codec stores is further from what the model computed."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmcache_kvcmas.kernels.quantise import FP8, dequantise, quantise_fp8, quantise_int8

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]
BOTH = pytest.mark.parametrize("quantise", [quantise_int8, quantise_fp8])
TINY = 448 * torch.finfo(torch.float32).tiny  # below it a row may be taken for nothing


def bound(quantise: Quantise, x: Tensor) -> Tensor:
    """What the code formats allow, derived: half an int8 step; half of E4M3's last bit (OCP 8-bit floating point
    specification, revision 1.0, table 1: 3 mantissa bits, smallest normal number 2^-6). 1e-6 for fp32's roundings.
    """
    amax = x.abs().amax(-1, keepdim=True)
    if quantise is quantise_int8:
        half = (amax / 127 / 2).expand_as(x)
    else:
        half = torch.maximum(x.abs() * 2.0**-4, amax / 448 * 2.0**-10)
    return half * (1 + 1e-6) + 2e-7 * x.abs() + TINY


def rows(seed: int, *shape: int, spread: float = 3.0) -> Tensor:
    """Rows whose channels differ by orders of magnitude, as those of keys do."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp(spread * torch.randn(shape[-1], generator=g))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_value_is_further_off_than_the_format_allows(quantise: Quantise, dtype: torch.dtype) -> None:
    x = rows(1, 4, 50, 3, 64).clamp(-6e4, 6e4).to(dtype)
    codes, scale = quantise(x)
    assert codes.dtype == (torch.int8 if quantise is quantise_int8 else FP8)
    assert (codes.shape, scale.shape, scale.dtype) == (x.shape, x.shape[:3], torch.float32)
    back = dequantise(codes, scale, torch.float32)
    assert ((back - x.float()).abs() <= bound(quantise, x.float())).all()
    assert torch.equal(dequantise(codes, scale, dtype), back.to(dtype))


@BOTH
def test_the_largest_of_a_row_comes_back_as_itself(quantise: Quantise) -> None:
    """Keys have a few large channels that decide where attention goes: a format that saturates would move them."""
    x = rows(2, 2, 40, 2, 16)
    back = dequantise(*quantise(x), torch.float32)
    at = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(back.gather(-1, at), x.gather(-1, at), rtol=1e-6, atol=0)


def test_int8_is_close_enough_for_keys_and_fp8_is_coarser() -> None:
    """On rows of normal values: relative error .0060 (int8) and .025 (fp8) measured; a third more is a defect."""
    x = torch.randn(2, 200, 4, 64, generator=torch.Generator().manual_seed(3))
    errors = [float((dequantise(*q(x), torch.float32) - x).norm() / x.norm()) for q in (quantise_int8, quantise_fp8)]
    assert errors[0] < 0.0083
    assert errors[1] < 0.033


@BOTH
def test_zeros_are_zeros(quantise: Quantise) -> None:
    """Padding, and heads that do nothing: a division by their scale must not make NaN of them."""
    x = rows(4, 2, 6, 2, 8)
    x[0, 3, 1] = 0
    x[1, 0, 0] = 1e-40
    codes, scale = quantise(x)
    assert scale[0, 3, 1] == scale[1, 0, 0] == 0
    back = dequantise(codes, scale, torch.float32)
    assert torch.isfinite(back).all()
    assert not back[0, 3, 1].any()
    assert not back[1, 0, 0].any()


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_says_so_and_touches_no_other(quantise: Quantise, bad: float) -> None:
    """An overflow in one head must not become plausible numbers, nor cost the chunk's other rows a bit."""
    x = rows(5, 2, 6, 3, 8)
    want = quantise(x)
    x[1, 4, 2, 5] = bad
    codes, scale = quantise(x)
    back = dequantise(codes, scale, torch.float32)
    assert back[1, 4, 2].isnan().all()
    others = torch.ones(2, 6, 3, dtype=torch.bool)
    others[1, 4, 2] = False
    assert torch.equal(codes.float()[others], want[0].float()[others])
    assert torch.equal(scale[others], want[1][others])
    assert not codes.float().isnan().any()


@BOTH
def test_the_same_codes_whatever_stands_beside_a_row(quantise: Quantise) -> None:
    """Equal keys mean equal entries: a chunk must not depend on how it was batched, or on what ran before."""
    x = rows(6, 3, 33, 2, 24)
    codes, scale = quantise(x)
    for t in (0, 7, 32):
        one, of_one = quantise(x[:, t : t + 1].clone())
        assert torch.equal(one.float(), codes[:, t : t + 1].float())
        assert torch.equal(of_one, scale[:, t : t + 1])
    flipped = quantise(x.flip(1))
    assert torch.equal(flipped[0].float().flip(1), codes.float())


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers_of_a_dtype_survive(quantise: Quantise, dtype: torch.dtype) -> None:
    """fp16 caches do reach 65504; rounding up in between must not make infinity of it."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, largest / 2, 0, 1]).to(dtype).view(1, 1, 1, 5)
    back = dequantise(*quantise(x), dtype)
    assert torch.isfinite(back).all()
    torch.testing.assert_close(back[..., :2], x[..., :2], rtol=1e-6, atol=0)


@BOTH
@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=12), st.integers(-30, 30))
def test_any_row_at_all(quantise: Quantise, values: list[float], exponent: int) -> None:
    """Either within the bound, or NaN because the row holds what is not finite: nothing in between."""
    x = torch.tensor(values, dtype=torch.float32) * 2.0**exponent
    x = x.view(1, 1, 1, -1)
    codes, scale = quantise(x)
    back = dequantise(codes, scale, torch.float32)
    if torch.isfinite(x).all():
        assert ((back - x).abs().double() <= bound(quantise, x.double())).all()
        assert torch.equal(quantise(-x)[1], scale)
    else:
        assert back.isnan().all()
