"""Small made-up edges: low-rank bases and deltas that depend on them, as real ones do."""

from collections.abc import Callable

import pytest
import torch

from lmcache_kvcmas.anchors import Anchor, Caches

LAYERS, CHANNELS = 3, 24
Run = tuple[Caches, Caches]


@pytest.fixture
def run() -> Callable[..., Run]:
    """``run(seed, tokens)`` → (base, delta)."""
    mix = torch.randn(6, 4 * CHANNELS, generator=torch.Generator().manual_seed(99))

    def make(seed: int, tokens: int = 30) -> Run:
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(LAYERS, tokens, 6, generator=generator)
        rows = hidden @ mix + 0.1 * torch.randn(LAYERS, tokens, 4 * CHANNELS, generator=generator)
        k, v, dk, dv = rows.split(CHANNELS, 2)
        return Caches(k, v), Caches(0.1 * dk, 0.1 * dv)

    return make


@pytest.fixture
def anchor(run: Callable[..., Run]) -> Callable[..., Anchor]:
    """``anchor(seed, tokens, rank=8)``, in fp32 so that a reference can be exact."""

    def make(seed: int, tokens: int = 30, rank: int = 8) -> Anchor:
        return Anchor.learn(*run(seed, tokens), rank=rank, dtype=torch.float32)

    return make
