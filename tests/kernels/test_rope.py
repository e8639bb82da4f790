"""Moving keys. Wrong here, every reused cache is wrong: attention would look for tokens where they are not."""

import pytest
import torch
from transformers.models.cohere.modeling_cohere import rotate_half as rotate_pairs
from transformers.models.llama.modeling_llama import rotate_half

from lmcache_kvcmas.kernels.rope import RopeTable, rotate

HEADS, DIM = 3, 64


def table(interleaved: bool = False, rotary: int = DIM, theta: float = 1e5) -> RopeTable:
    inv_freq = theta ** -(torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    return RopeTable(inv_freq, DIM, rotary, interleaved)


def keys(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, HEADS * DIM, generator=torch.Generator().manual_seed(seed))


def test_rotation_is_the_one_llama_uses() -> None:
    """Keys rotated here must be keys that a NeoX-style model would have cached."""
    rope, k = table(), keys(50)
    cos, sin = rope.at(torch.arange(50))
    x = k.view(50, HEADS, DIM)
    both = torch.cat([cos, cos], 1)[:, None], torch.cat([sin, sin], 1)[:, None]
    expected = x * both[0] + rotate_half(x) * both[1]
    torch.testing.assert_close(rope.rotate(k, cos, sin).view_as(x), expected, atol=1e-6, rtol=0)


def test_rotation_is_the_one_cohere_uses() -> None:
    """The same for a model that pairs neighbouring channels (GPT-J style)."""
    rope, k = table(interleaved=True), keys(50)
    cos, sin = rope.at(torch.arange(50))
    x = k.view(50, HEADS, DIM)
    both = cos.repeat_interleave(2, 1)[:, None], sin.repeat_interleave(2, 1)[:, None]
    expected = x * both[0] + rotate_pairs(x) * both[1]
    torch.testing.assert_close(rope.rotate(k, cos, sin).view_as(x), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [DIM, 32])
def test_there_and_back(interleaved: bool, rotary: int) -> None:
    """Position-free keys must be free of their position: forward from anywhere gives the same as from the start."""
    rope, k = table(interleaved, rotary), keys(40)
    near, far = rope.at(torch.arange(40)), rope.at(torch.arange(40) + 7000)
    free = rope.rotate(rope.rotate(k, *far), *far, inverse=True)
    # fp32 rounding of two rotations of N(0, 1) keys: 7e-7 measured.
    torch.testing.assert_close(free, k, atol=3e-6, rtol=0)
    torch.testing.assert_close(rope.rotate(free, *near), rope.rotate(k, *near), atol=3e-6, rtol=0)
    beyond = k.view(40, HEADS, DIM)[..., rotary:]
    assert torch.equal(rope.rotate(k, *far).view(40, HEADS, DIM)[..., rotary:], beyond)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("by", [1, 513, -37])
def test_constant_shift_is_a_rotation(interleaved: bool, by: int) -> None:
    """The fast path (one matrix) and the general one must put keys in the same place."""
    rope, k = table(interleaved, 48), keys(30)
    here = rope.at(torch.arange(30) + 100)
    there = rope.at(torch.arange(30) + 100 + by)
    torch.testing.assert_close(rope.moved(rope.rotate(k, *here), by), rope.rotate(k, *there), atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_shift_changes_no_bit(dtype: torch.dtype) -> None:
    """An agent's own prefix must come back as it was, and in the cache's own dtype."""
    k = keys(20).to(dtype)
    k[3, 5] = -0.0
    moved = table().moved(k, 0)
    assert moved.dtype is dtype
    assert torch.equal(moved.view(torch.uint8), k.view(torch.uint8))
    assert table().moved(k, 9).dtype is dtype


def test_far_positions_keep_their_angle() -> None:
    """At 100k tokens, angles computed in fp32 would be off by 1e-2 rad, and long contexts would blur."""
    rope = table()
    positions = torch.tensor([99_999, 100_000])
    cos, sin = rope.at(positions)
    angles = positions.double()[:, None] * (1e5 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM))
    torch.testing.assert_close(cos.double(), angles.cos(), atol=1e-7, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin(), atol=1e-7, rtol=0)


def test_growing_does_not_move_what_was_there() -> None:
    """A longer request must not change the cache of a shorter one."""
    rope = table()
    before = rope.at(torch.arange(10))
    rope.reserve(50_000)
    assert all(torch.equal(a, b) for a, b in zip(before, rope.span(0, 10), strict=True))


def test_three_dimensional_keys_keep_their_shape() -> None:
    rope, k = table(), keys(10)
    angles = rope.at(torch.arange(10))
    whole = rotate(k.view(10, HEADS, DIM), *angles, DIM)
    assert whole.shape == (10, HEADS, DIM)
    assert torch.equal(whole.view(10, -1), rope.rotate(k, *angles))


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="rotary_dim 64"):
        RopeTable(torch.ones(16), 64, 64)
    with pytest.raises(ValueError, match="head_dim 32"):
        RopeTable(torch.ones(32), 32, 64)
