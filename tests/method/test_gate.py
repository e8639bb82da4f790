"""When a prediction may be used. Too lax, answers change; too strict, nothing is saved."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kvcmas.choose import WINDOW, choose
from lmcache_kvcmas.gate import Reason, Reliability, decide, ehat_of
from lmcache_kvcmas.predict import LayerPrediction


def prediction(spread_k: float, spread_v: float, tokens: int = 10) -> LayerPrediction:
    return LayerPrediction(None, None, torch.full((tokens,), spread_k), torch.full((tokens,), spread_v), None)


def test_ehat_is_its_formula() -> None:
    """ê² = mean over layers >= 1 and K, V of Σ spread / Σ ‖B‖²."""
    reliability = Reliability(3, 10)
    k, v = torch.ones(10, 4), 2 * torch.ones(10, 4)
    reliability.add(0, LayerPrediction(), k, v)
    reliability.add(1, prediction(0.4, 1.6), k, v)
    reliability.add(2, prediction(0.8, 3.2), k, v)
    assert math.isclose(reliability.ehat(), math.sqrt((0.1 + 0.1 + 0.2 + 0.2) / 4), rel_tol=1e-6)


def test_recomputed_rows_are_not_judged() -> None:
    spread = torch.tensor([100.0] * 4 + [0.4] * 6)
    reliability = Reliability(2, 10)
    reliability.add(1, LayerPrediction(None, None, spread, spread, None), torch.ones(10, 4), torch.ones(10, 4))
    assert math.isclose(reliability.ehat(torch.arange(4)), math.sqrt(0.1), rel_tol=1e-6)


def test_doubts_are_each_tokens_part_of_ehat() -> None:
    """What is chosen to be recomputed is what ê is made of: doubts add up to ê² times the number of its terms."""
    k, v = torch.ones(10, 4), 2 * torch.ones(10, 4)
    spread = torch.arange(10.0)
    reliability = Reliability(3, 10)
    reliability.add(0, LayerPrediction(), k, v)
    for layer in (1, 2):
        reliability.add(layer, LayerPrediction(None, None, spread, 8 * spread, None), k, v)
    doubts = reliability.doubts()
    torch.testing.assert_close(doubts, 2 * spread / 40 + 2 * 8 * spread / 160)
    assert math.isclose(float(doubts.sum()) / 4, reliability.ehat() ** 2, rel_tol=1e-6)
    assert not Reliability(3, 10).doubts().any()


@pytest.mark.parametrize(
    ("count", "head", "rows"),
    [
        (16, 0, range(21, 37)),  # 16-row windows begin at 5, 21 and 37
        (20, 0, [*range(4), *range(21, 37)]),
        (25, 0, [*range(5), *range(21, 37), *range(37, 41)]),
        (3, 0, range(21, 24)),
        (20, 5, [*range(21, 37), *range(37, 41)]),
        (99, 22, range(22, 53)),
        (0, 0, []),
        (-1, 1, []),
    ],
)
def test_windows_of_the_largest_doubts_behind_the_head_are_chosen(count: int, head: int, rows: Sequence[int]) -> None:
    """The last of them in part, so that the share is kept to the token."""
    doubts = torch.full((53,), 0.1)
    doubts[[30, 2, 40]] = torch.tensor([9.0, 7.0, 5.0])
    doubts[5:21] = 0.12
    if head:
        doubts[head - 1] = 99.0  # computed anyway
    assert choose(doubts, count, head).tolist() == list(rows)


@given(st.integers(0, 90), st.integers(0, 40), st.integers(0, 100), st.integers(0, 2**32 - 1))
def test_no_more_rows_than_asked_for_are_chosen_and_no_fewer(tokens: int, head: int, count: int, seed: int) -> None:
    head = min(head, tokens)
    doubts = torch.rand(tokens, generator=torch.Generator().manual_seed(seed))
    rows = choose(doubts, count, head)
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert len(rows) == min(count, tokens - head)
    assert all(head <= row < tokens for row in rows.tolist())


@given(st.integers(16, 90), st.integers(0, 2**32 - 1))
def test_a_run_whose_beginning_is_held_has_the_same_windows(tokens: int, seed: int) -> None:
    doubts = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) + torch.eye(tokens)[seed % tokens] * 20
    rows = choose(doubts, WINDOW)
    if rows[-1] - rows[0] == WINDOW - 1:  # not the first one, which may be short
        cut = max(0, int(rows[0]) - 5)
        assert (choose(doubts[cut:], WINDOW) + cut).tolist() == rows.tolist()


def test_ranks_agree_after_adding_their_sums() -> None:
    """Each tensor-parallel rank sees its own heads: dividing before adding would give each another decision."""
    k = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
    spread = [torch.rand(10, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    ranks = []
    for half in (0, 1):
        one = Reliability(2, 10)
        part = k[:, 4 * half : 4 * half + 4]
        one.add(1, LayerPrediction(None, None, spread[half], spread[half], None), part, part)
        ranks.append(one.sums())
    whole = Reliability(2, 10)
    whole.add(1, LayerPrediction(None, None, sum(spread), sum(spread), None), k, k)
    assert math.isclose(ehat_of(ranks[0] + ranks[1]), whole.ehat(), rel_tol=1e-6)


def test_nothing_predicted_is_no_error() -> None:
    reliability = Reliability(3, 2)
    for layer in range(3):
        reliability.add(layer, LayerPrediction(), torch.ones(2, 2), torch.ones(2, 2))
    assert reliability.ehat() == 0


@pytest.mark.parametrize(
    ("ehat", "chain", "anchors", "reason"),
    [
        (0.048, 0.0, 2, Reason.ACCEPTED),
        (0.0481, 0.0, 2, Reason.UNRELIABLE),
        (0.01, 0.0, 1, Reason.FEW_ANCHORS),
        (0.04, 0.0077, 10, Reason.CHAIN),
        (0.04, 0.0075, 10, Reason.ACCEPTED),
        (math.nan, 0.0, 10, Reason.NOT_FINITE),
        (0.01, math.inf, 10, Reason.NOT_FINITE),
    ],
)
def test_decisions(ehat: float, chain: float, anchors: int, reason: Reason) -> None:
    """Default θ .048 for a hop and twice that for a chain (.096² = .0092); what is not a number is not trusted."""
    decision = decide(ehat, chain, anchors=anchors)
    assert decision.reason is reason
    assert decision.accepted is (reason is Reason.ACCEPTED)


def test_the_chain_adds_up() -> None:
    """Hops that pass alone must not add up to something nobody would accept."""
    error2, hops = 0.0, 0
    while (decision := decide(0.04, error2, anchors=10)).accepted:
        error2, hops = decision.chain_error2, hops + 1
    assert hops == 5  # 5 · .04² = .008 <= .0081 < 6 · .04²
    assert decide(0.04, error2, chain_theta=0.2, anchors=10).accepted
