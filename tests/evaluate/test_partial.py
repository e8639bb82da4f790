"""Selective recompute. If it were only an approximation of itself, rivals that recompute would be measured wrongly."""

import pytest
import torch
from tiny_model import LAYERS, NEW, SEEN
from torch import Tensor

from lmcache_kvcmas.errors import UnsupportedModelError
from lmcache_kvcmas.evaluate import partial
from lmcache_kvcmas.evaluate.cases import Case, rotated
from lmcache_kvcmas.evaluate.dense import Active
from lmcache_kvcmas.evaluate.partial import PartialRun, entering, partial_run
from lmcache_kvcmas.evaluate.runs import DenseRuns


@pytest.fixture
def case(tiny: DenseRuns) -> Case:
    return tiny.case("solver", "critic", SEEN)


def over(case: Case, run: Active) -> PartialRun:
    return partial_run(case.model, case.prefix, case.run, run)


def damaged(run: Active, rows: Tensor) -> Active:
    noise = torch.randn(run.k.shape, generator=torch.Generator().manual_seed(1))
    return Active(run.k.index_add(1, rows, noise[:, rows]), run.v.index_add(1, rows, noise[:, rows]))


def assert_same(a: Active, b: Active, atol: float = 1e-4) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=0)


def test_all_tokens_in_all_layers_are_dense(case: Case) -> None:
    run = over(case, rotated(case))
    for layer in range(LAYERS):
        run.step(layer)
    assert_same(run.active, case.dense)
    assert run.share == 1
    assert (rotated(case).k[1:] - case.dense.k[1:]).abs().max() > 0.1


def test_no_tokens_leave_the_cache_as_it_was(case: Case) -> None:
    run = over(case, rotated(case))
    run.begin(torch.arange(0))
    for layer in range(LAYERS):
        assert run.step(layer) is None
    assert_same(run.active, rotated(case), atol=0)
    assert run.computed == 0


def test_a_dense_cache_stays_dense_whatever_is_recomputed(case: Case) -> None:
    """Fewer tokens from layer to layer, none of them neighbours."""
    run = over(case, case.dense)
    for layer, stride in enumerate((1, 2, 4, 12)):
        run.keep(torch.arange(0, len(case.run), stride))
        run.step(layer)
    assert_same(run.active, case.dense)
    assert run.computed == 90 + 45 + 23 + 8


def test_the_tail_is_what_the_models_own_forward_gives_on_the_same_cache(case: Case) -> None:
    """On a cache that is wrong in front: the two must agree on what that does to the tokens behind."""
    wrong = damaged(case.dense, torch.arange(5, 40))
    expected, _ = case.model.extend(case.prefix.then(wrong.rows(0, 50)), case.run[50:])
    run = over(case, wrong)
    run.begin(torch.arange(50, 90))
    for layer in range(LAYERS):
        run.step(layer)
    assert_same(run.active.rows(50, 90), expected)
    assert_same(run.active.rows(0, 50), wrong.rows(0, 50), atol=0)
    assert (expected.k - case.dense.k[:, 50:]).abs().max() > 0.01


def test_nothing_behind_a_token_reaches_it(case: Case) -> None:
    rows = torch.tensor([3, 20, 21])
    runs = [over(case, x) for x in (case.dense, damaged(case.dense, torch.arange(22, 90)))]
    for run in runs:
        run.begin(rows)
        for layer in range(LAYERS):
            run.step(layer)
    assert_same(*(Active(*(x[:, rows] for x in run.active)) for run in runs), atol=1e-6)


def test_hidden_states_carry_a_start_in_the_middle(case: Case, tiny: DenseRuns) -> None:
    """What enters layer 2 of the destination's own prefill makes layers 2 and 3 exact, and touches no others."""
    run = over(case, rotated(case))
    run.begin(torch.arange(90), entering(case.model, case.prefix, case.run, 2))
    run.step(2), run.step(3)
    assert_same(Active(*(x[2:] for x in run.active)), Active(*(x[2:] for x in case.dense)))
    assert_same(Active(*(x[:2] for x in run.active)), Active(*(x[:2] for x in rotated(case))), atol=0)
    assert run.share == 0.5


def test_watched_weights_are_those_of_attention(case: Case) -> None:
    """Rows sum to less than 1 by what goes to the prefix; watching changes nothing."""
    plain, watched = over(case, case.dense), over(case, case.dense)
    plain.step(0)
    weights = watched.step(0, watch=True)
    assert weights is not None
    assert weights.shape == (4, 90, 90)
    assert bool((weights.sum(2) < 1).all())
    assert bool((weights >= 0).all())
    assert float(weights.triu(1).abs().max()) == 0
    torch.testing.assert_close(watched.hidden, plain.hidden, atol=1e-5, rtol=0)
    assert case.model.model.config._attn_implementation != "eager"


def test_rows_that_were_let_go_do_not_come_back(case: Case) -> None:
    run = over(case, case.dense)
    run.keep(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="must be among"):
        run.keep(torch.tensor([2, 3]))


def test_a_model_that_does_more_between_layers_is_refused(tiny: DenseRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some scale their embeddings: silently different caches would be blamed on the methods."""
    case = tiny.case("solver", "critic", NEW)
    decoder = case.model.model.get_decoder()
    inside = decoder.forward

    def scaled(input_ids: Tensor, **rest: object) -> object:
        return inside(**{**rest, "inputs_embeds": 2 * decoder.embed_tokens(input_ids) + 1})

    partial._prove.cache_clear()
    monkeypatch.setattr(decoder, "forward", scaled)
    with pytest.raises(UnsupportedModelError, match="cannot be run layer by layer"):
        over(case, case.dense)
