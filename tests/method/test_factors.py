"""What a store keeps of a delta."""

import pytest
import torch

from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.factors import Factors


def matrix(tokens: int = 100, channels: int = 48) -> torch.Tensor:
    return torch.randn(3, tokens, channels, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rank", [33, 48, 1000])
def test_full_rank_is_exact(rank: int) -> None:
    """A rank that saves nothing (100·48/148 = 32.4) must keep everything: then the true delta gives dense back."""
    x = matrix()
    factors = Factors.of(x, rank, torch.float32)
    assert factors.v is None
    assert all(torch.equal(factors.expand(i), x[i]) for i in range(3))


def test_factors_save_bytes() -> None:
    x = matrix(400)
    factors = Factors.of(x, 8)
    assert factors.nbytes == 3 * 8 * (400 + 48) * 2
    assert (factors.layers, factors.tokens, factors.channels) == (3, 400, 48)


@pytest.mark.parametrize("rank", [8, 1000])
def test_rows_are_rows(rank: int) -> None:
    """A run that starts inside a stored one must get the delta of its own tokens."""
    factors = Factors.of(matrix(), rank)
    whole = factors.expand(1)
    assert whole.dtype is torch.float32
    torch.testing.assert_close(factors.rows(20, 50).expand(1), whole[20:50])
    torch.testing.assert_close(factors.expand(1, slice(20, 50)), whole[20:50])


@pytest.mark.parametrize("rank", [8, 1000])
def test_round_trip_through_tensors(rank: int) -> None:
    factors = Factors.of(matrix(), rank)
    again = Factors.from_tensors(factors.tensors())
    assert torch.equal(again.expand(2), factors.expand(2))


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"u": torch.zeros(1, 2, 3)},
        {"u": torch.zeros(1, 2, 3), "v": torch.zeros(1, 4, 5)},
        {"u": torch.zeros(2, 2, 3), "v": torch.zeros(1, 3, 5)},
        {"full": torch.zeros(2, 2)},
        {"full": torch.zeros(1, 2, 2), "u": torch.zeros(1, 2, 2)},
    ],
)
def test_tensors_that_do_not_fit_are_a_miss(tensors: dict[str, torch.Tensor]) -> None:
    """Foreign or damaged entries end as a miss (EntryError), never as a shape error while serving."""
    with pytest.raises(EntryError):
        Factors.from_tensors(tensors)
