"""The one step from a source's cache to a destination's."""

import torch

from lmcache_kvcmas.kernels.correct import correct, release
from lmcache_kvcmas.kernels.rope import RopeTable

DIM, TOKENS = 32, 40
ROPE = RopeTable(1e4 ** -(torch.arange(0, DIM, 2).double() / DIM), DIM)


def random(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, 2 * DIM, generator=torch.Generator().manual_seed(seed))


def test_release_and_correct_are_the_formula() -> None:
    """K' = R(dst)·(R(src)ᵀ·K + ΔK), V' = V + ΔV, here in fp64 with complex numbers."""
    k, v, dk, dv = (random(i) for i in range(4))
    src, dst = torch.arange(TOKENS) + 11, torch.arange(TOKENS) + 300

    def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        pairs = x.double().view(TOKENS, 2, 2, DIM // 2)
        angle = positions.double()[:, None, None] * (1e4 ** -(torch.arange(0, DIM, 2).double() / DIM))
        turned = torch.complex(pairs[:, :, 0], pairs[:, :, 1]) * torch.polar(torch.ones_like(angle), angle)
        return torch.stack([turned.real, turned.imag], 2).view(TOKENS, 2 * DIM)

    free = release(ROPE, k, *ROPE.at(src))
    new_k, new_v = correct(ROPE, free, v, dk, dv, *ROPE.at(dst))
    expected = turn(turn(k, -src) + dk.double(), dst)
    # fp32 rounding of two rotations: 1e-6 measured.
    torch.testing.assert_close(new_k.double(), expected, atol=4e-6, rtol=0)
    torch.testing.assert_close(new_v, v + dv)


def test_nothing_to_add_is_rotation_only() -> None:
    k, v = random(0), random(1)
    angles = ROPE.at(torch.arange(TOKENS))
    new_k, new_v = correct(ROPE, k, v, None, None, *angles)
    assert torch.equal(new_k, ROPE.rotate(k, *angles))
    assert torch.equal(new_v, v)


def test_sums_are_fp32_and_the_result_in_the_cache_dtype() -> None:
    """A small delta on a bf16 cache must not be lost before the rotation, and the cache gets its own dtype."""
    k = torch.ones(TOKENS, 2 * DIM, dtype=torch.bfloat16)
    tiny = torch.full((TOKENS, 2 * DIM), 1e-4)
    still = torch.zeros(TOKENS, dtype=torch.long)
    summed, _ = correct(ROPE, k, k, tiny, tiny, *ROPE.at(still), dtype=torch.float32)
    torch.testing.assert_close(summed, torch.full_like(summed, 1.0001), atol=1e-7, rtol=0)
    assert all(x.dtype is torch.bfloat16 for x in correct(ROPE, k, k, tiny, tiny, *ROPE.at(still)))
