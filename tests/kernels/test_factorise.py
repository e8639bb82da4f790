"""Low-rank factors. Worse here, every stored delta and anchor carries more error than its bytes buy."""

import pytest
import torch

from lmcache_kvcmas.kernels.factorise import factorise, leading


def matrices(tokens: int, channels: int, layers: int = 4) -> torch.Tensor:
    """Spectra that fall over two decades, as deltas' do."""
    generator = torch.Generator().manual_seed(1)
    n = min(tokens, channels)
    left = torch.randn(layers, tokens, n, generator=generator) * torch.logspace(0, -2, n)
    return left @ torch.randn(layers, n, channels, generator=generator) / channels**0.5


@pytest.mark.parametrize(("tokens", "channels"), [(400, 192), (150, 192), (50, 192), (300, 512), (600, 1024)])
def test_close_to_the_best_rank_32(tokens: int, channels: int) -> None:
    """Nobody can do better than the SVD; 1.0002-1.01 times its error was measured, on each branch."""
    x = matrices(tokens, channels)
    u, v = factorise(x, 32)
    assert u.shape == (4, tokens, 32)
    assert v.shape == (4, 32, channels)
    best = torch.linalg.svdvals(x)[:, 32:].norm()
    assert (x - u @ v).norm() <= 1.02 * best


@pytest.mark.parametrize(("tokens", "channels"), [(400, 192), (50, 192), (300, 512)])
def test_cutting_further_is_still_good(tokens: int, channels: int) -> None:
    """A reader may use fewer columns than were stored: they are in order of energy, and rows of v are orthonormal."""
    x = matrices(tokens, channels)
    u, v = factorise(x, 32)
    best = torch.linalg.svdvals(x)[:, 16:].norm()
    assert (x - u[..., :16] @ v[:, :16]).norm() <= 1.02 * best
    torch.testing.assert_close(v @ v.mT, torch.eye(32).expand(4, -1, -1), atol=1e-4, rtol=0)


def test_same_numbers_every_time() -> None:
    """Tensor-parallel ranks and restarts must agree; what is stored must not depend on what ran before."""
    x = matrices(200, 192)
    first = factorise(x, 32)
    torch.randn(5)
    assert all(torch.equal(a, b) for a, b in zip(first, factorise(x, 32), strict=True))


@pytest.mark.parametrize(("tokens", "channels"), [(100, 64), (40, 64), (300, 300)])
def test_a_delta_of_nothing_is_nothing(tokens: int, channels: int) -> None:
    """Layer 0, and runs that do not differ: zeros and low ranks must not become NaN."""
    u, v = factorise(torch.zeros(2, tokens, channels), 32)
    assert torch.equal(u @ v, torch.zeros(2, tokens, channels))
    x = torch.ones(2, tokens, 1) @ torch.arange(channels).float().expand(2, 1, -1)
    u, v = factorise(x, 32)
    torch.testing.assert_close(u @ v, x, atol=1e-3, rtol=1e-4)


def test_rank_above_the_sizes_is_exact() -> None:
    x = matrices(20, 192)
    u, v = factorise(x, 999)
    assert u.shape[2] == 20
    torch.testing.assert_close(u @ v, x, atol=1e-5, rtol=1e-4)


def test_rank_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is 0"):
        factorise(torch.zeros(1, 2, 2), 0)


def test_leading_directions_are_eigenvectors() -> None:
    x = matrices(400, 128)
    gram = x.mT @ x
    captured = (leading(gram, 32).mT @ gram @ leading(gram, 32)).diagonal(dim1=1, dim2=2).sum(1)
    best = torch.linalg.eigvalsh(gram.double())[:, -32:].sum(1).float()
    assert ((captured / best) > 0.999).all()
