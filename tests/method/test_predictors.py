"""Predictions, against the formulas written out token by token in fp64."""

import math
from collections.abc import Callable

import pytest
import torch

from lmcache_kvcmas.anchors import Anchor, AnchorPool, Caches
from lmcache_kvcmas.basis import EdgeBasis
from lmcache_kvcmas.predict import PREDICTORS, Predictor, build_predictor

Make = Callable[..., Anchor]
Run = Callable[..., tuple[Caches, Caches]]


def pool_of(*anchors: Anchor) -> AnchorPool:
    pool = AnchorPool(len(anchors))
    for anchor in anchors:
        pool.add(anchor)
    return pool


def bound(name: str, pool: AnchorPool, base: Caches, offsets: torch.Tensor) -> Predictor:
    return build_predictor(name, pool).bind(lambda i: (base.k[i], base.v[i]), offsets)


def attention_by_hand(
    anchors: tuple[Anchor, ...], layer: int, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights ``[T, N]``, ΔK, ΔV as design 3.4 has them."""
    basis = EdgeBasis.of(anchors)
    z = basis.z(layer, k, v).double()
    zj = basis.tokens[layer].double()
    j = torch.cat([a.offsets for a in anchors]).double()
    t = offsets.double()
    position = (torch.log2(1 + t)[:, None] - torch.log2(1 + j)[None]).square()
    d2 = torch.cdist(z, zj).square() + 0.02 * position
    m = d2.min(1, keepdim=True).values
    a = torch.softmax(-(d2 - m) / (m + 1e-3).clamp_max(0.1), 1)
    deltas = [torch.cat([getattr(x, n).expand(layer) for x in anchors]).double() for n in ("delta_k", "delta_v")]
    return a, a @ deltas[0], a @ deltas[1]


@pytest.mark.parametrize("chunk", [7, 10_000])
def test_attention_is_its_formula(anchor: Make, run: Run, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMMs, chunks and folded columns must not change a number; anchors kept whole (6 tokens) mix with factored."""
    anchors = (anchor(1, 30), anchor(2, 6), anchor(3, 50))
    predictor = build_predictor("attention", pool_of(*anchors))
    monkeypatch.setattr(predictor, "_chunk", chunk)
    base, _ = run(9, 40)
    offsets = torch.arange(40) + 5
    for layer in (1, 2):
        k, v = base.k[layer], base.v[layer]
        got = predictor.layer(layer, k, v, offsets)
        a, dk, dv = attention_by_hand(anchors, layer, k, v, offsets)
        # Distances of a few units in fp32, divided by temperatures of 1e-3 to 0.1: 2e-5 measured.
        torch.testing.assert_close(got.delta_k, dk.float(), atol=1e-4, rtol=0)
        torch.testing.assert_close(got.delta_v, dv.float(), atol=1e-4, rtol=0)
        norm2 = torch.cat([x.norm2_k[layer] for x in anchors]).double()
        torch.testing.assert_close(got.spread_k, (a @ norm2 - dk.square().sum(1)).float(), atol=1e-3, rtol=0)
        norm2 = torch.cat([x.norm2_v[layer] for x in anchors]).double()
        torch.testing.assert_close(got.spread_v, (a @ norm2 - dv.square().sum(1)).float(), atol=1e-3, rtol=0)
        mass = torch.stack([part.sum(1).mean() for part in a.split([30, 6, 50], 1)])
        torch.testing.assert_close(got.mass, mass.float(), atol=1e-4, rtol=0)


def test_attention_remembers_what_it_saw(run: Run) -> None:
    """A token that stands in an anchor, at its place, must get that anchor's delta, and be sure of it."""
    base, delta = run(1, 60)
    pool = pool_of(Anchor.learn(base, delta, 99, dtype=torch.float32), Anchor.learn(*run(2, 60), 99))
    got = build_predictor("attention", pool).layer(1, base.k[1], base.v[1], torch.arange(60))
    # At m = 0 the temperature is 1e-3: no other token has weight left. Rounding alone remains.
    assert (got.delta_k - delta.k[1]).square().sum() < 1e-6 * delta.k[1].square().sum()
    assert got.spread_k.sum() < 1e-6 * delta.k[1].square().sum()


def test_attention_beats_the_mean_where_deltas_depend_on_the_base(run: Run) -> None:
    """The reason for the default: on this made-up edge it leaves 0.10 of the energy, the mean 1.00."""
    pool = pool_of(*(Anchor.learn(*run(i, 100)) for i in range(6)))
    base, delta = run(50, 100)

    def left(name: str) -> float:
        got = build_predictor(name, pool).layer(2, base.k[2], base.v[2], torch.arange(100))
        return float((got.delta_k - delta.k[2]).square().sum() / delta.k[2].square().sum())

    assert left("attention") < 0.2
    assert left("mean") > 0.9


def test_mean_is_its_formula(anchor: Make, run: Run) -> None:
    anchors = (anchor(1, 30), anchor(2, 6))
    base, _ = run(9, 10)
    got = build_predictor("mean", pool_of(*anchors)).layer(1, base.k[1], base.v[1], torch.arange(10))
    tokens = torch.cat([a.delta_k.expand(1) for a in anchors])
    torch.testing.assert_close(got.delta_k, tokens.mean(0).expand(10, -1))
    norm2 = torch.cat([a.norm2_k[1] for a in anchors]).mean()
    torch.testing.assert_close(got.spread_k, (norm2 - tokens.mean(0).square().sum()).expand(10))
    torch.testing.assert_close(got.mass, torch.tensor([30 / 36, 6 / 36]))


def test_paper_is_its_formula(anchor: Make, run: Run) -> None:
    """Position by position, softmax over anchors that are long enough of −mean|base − anchor base|, K and V apart."""
    long, longer, short = anchor(1, 30), anchor(2, 40), anchor(3, 10)
    base, _ = run(9, 25)
    offsets = torch.arange(25)
    predictor = bound("paper", pool_of(long, short, longer), base, offsets)
    used = (long, longer)
    for name, key in (("k", "base_k"), ("v", "base_v")):
        mine = getattr(base, name).double()
        distance = torch.stack(
            [
                torch.stack([(mine[i] - getattr(a, key).expand(i)[:25].double()).abs().mean(1) for i in range(3)]).mean(
                    0
                )
                for a in used
            ],
            1,
        )
        w = torch.softmax(-distance, 1)
        got = predictor.layer(2, base.k[2], base.v[2], offsets)
        delta = sum(w[:, j, None] * getattr(a, f"delta_{name}").expand(2)[:25] for j, a in enumerate(used))
        torch.testing.assert_close(getattr(got, f"delta_{name}"), delta.float(), atol=1e-5, rtol=0)
    assert got.mass is not None
    assert float(got.mass[1]) == 0
    assert math.isclose(float(got.mass.sum()), 1, rel_tol=1e-5)


def test_paper_leaves_the_tail_beyond_the_longest_anchor(anchor: Make, run: Run) -> None:
    base, _ = run(9, 50)
    got = bound("paper", pool_of(anchor(1, 20), anchor(2, 30)), base, torch.arange(50)).layer(
        1, base.k[1], base.v[1], torch.arange(50)
    )
    assert got.delta_k is not None
    assert got.delta_k[:30].abs().sum(1).min() > 0
    assert got.delta_k[30:].abs().max() == 0


def test_paper_finds_the_nearest_kept_position(run: Run) -> None:
    """Long anchors keep some of their tokens only: the token beside must answer, not the one at the same row."""
    base, delta = run(1, 90)
    pool = pool_of(Anchor.learn(base, delta, 99, keep=30, dtype=torch.float32))
    offsets = torch.tensor([0, 44, 89])
    asked = Caches(base.k[:, offsets], base.v[:, offsets])
    got = bound("paper", pool, asked, offsets).layer(1, asked.k[1], asked.v[1], offsets)
    rows = pool.anchors[0].offsets
    nearest = [int(rows[(rows - o).abs().argmin()]) for o in offsets]
    torch.testing.assert_close(got.delta_k, delta.k[1, nearest])


def test_paper_says_that_it_must_be_bound(anchor: Make, run: Run) -> None:
    base, _ = run(9, 10)
    with pytest.raises(RuntimeError, match="bind"):
        build_predictor("paper", pool_of(anchor(1))).layer(1, base.k[1], base.v[1], torch.arange(10))


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_layer_zero_is_never_corrected(anchor: Make, run: Run, name: str) -> None:
    """Layer 0 sees the token alone: a correction there would only add error."""
    base, _ = run(9, 10)
    got = bound(name, pool_of(anchor(1), anchor(2)), base, torch.arange(10)).layer(
        0, base.k[0], base.v[0], torch.arange(10)
    )
    assert got == (None,) * 5


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_an_empty_pool_predicts_nothing(run: Run, name: str) -> None:
    base, _ = run(9, 10)
    got = build_predictor(name, AnchorPool()).layer(1, base.k[1], base.v[1], torch.arange(10))
    assert got == (None,) * 5


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_one_token_is_enough(anchor: Make, run: Run, name: str) -> None:
    base, _ = run(9, 1)
    got = bound(name, pool_of(anchor(1, 1), anchor(2, 1)), base, torch.tensor([3])).layer(
        1, base.k[1], base.v[1], torch.tensor([3])
    )
    assert got.delta_k is None or torch.isfinite(got.delta_k).all()


def test_an_unknown_predictor_is_named() -> None:
    with pytest.raises(ValueError, match=r"'magic'.*attention, mean, none, paper"):
        build_predictor("magic", AnchorPool())


def test_a_run_unlike_all_anchors_gets_finite_deltas(anchor: Make, run: Run) -> None:
    """Distances of 1e6 must not end in 0/0: weights still sum to one."""
    base, _ = run(9, 20)
    got = build_predictor("attention", pool_of(anchor(1), anchor(2))).layer(
        1, 1e3 * base.k[1], 1e3 * base.v[1], torch.arange(20) + 100_000
    )
    assert got.delta_k is not None
    assert got.mass is not None
    assert torch.isfinite(got.delta_k).all()
    assert math.isclose(float(got.mass.sum()), 1, rel_tol=1e-4)


def test_basis_coordinates_have_unit_size(anchor: Make) -> None:
    """Temperatures are in units of the pool's own mean ‖z‖²: without that, no constant would fit two models."""
    anchors = (anchor(1), anchor(2))
    basis = EdgeBasis.of(anchors)
    for layer in (1, 2):
        assert math.isclose(float(basis.tokens[layer].square().sum(1).mean()), 1, rel_tol=1e-4)
        k, v = (torch.cat([getattr(a, n).expand(layer) for a in anchors]) for n in ("base_k", "base_v"))
        torch.testing.assert_close(basis.z(layer, k, v), basis.tokens[layer], atol=1e-5, rtol=0)
    assert basis.tokens[0].abs().max() == 0
