"""What the method reaches on real weights (SmolLM2-135M-Instruct, fp32). Worse here, agents read a worse cache.

Each bound stands beside what was measured; KL is to dense, over 16 teacher-forced tokens.
"""

import pytest
import torch
from measured_rows import EDGES, Measured

from lmcache_kvcmas.evaluate.cases import Examples
from lmcache_kvcmas.evaluate.chain import ChainRow
from lmcache_kvcmas.evaluate.measures import rank_correlation
from lmcache_kvcmas.evaluate.methods import METHODS, Oracle, Predicted
from lmcache_kvcmas.evaluate.runs import ANSWER_TOKENS, DenseRuns
from lmcache_kvcmas.gate import DEFAULT_THETA

pytestmark = pytest.mark.timeout(1800)


def test_the_default_on_one_edge(measured: Measured) -> None:
    """Measured .26."""
    assert measured.kl("attention+head", "solver:critic") <= 0.35 * measured.kl("none", "solver:critic")


def test_the_default_on_three_edges(measured: Measured) -> None:
    """Measured .32 (.37, .26, .33)."""
    assert measured.ratio("attention+head") <= 0.42


def test_choosing_tokens_brings_the_ceiling_nearer(measured: Measured) -> None:
    """8% more tokens, those that the anchors disagree about. Measured .23 against .32, better on each edge."""
    assert measured.ratio("attention+head+chosen") <= 0.3
    for source, destination in EDGES:
        edge = f"{source}:{destination}"
        assert measured.kl("attention+head+chosen", edge) < measured.kl("attention+head", edge)


def test_little_recompute_goes_far_on_runs_of_400_tokens(measured: Measured) -> None:
    """A head of 32 and 8% are at most 15% there, on the mean. Measured .090 (9 transitions at 13.4%)."""
    long = Measured([r for r in measured.rows if r.tokens >= 400])
    assert long.mean("attention+head+chosen", "recompute") <= 0.15
    assert long.ratio("attention+head+chosen") <= 0.2


def test_ours_is_the_closest_of_all_that_recompute_at_most_15_percent(measured: Measured) -> None:
    """Measured: .26, .36 and .26 of rotation only at just 15%; the nearest is our own without recompute, .66, .84, .52.

    Methods that hold a dense prefill of this very context belong beside our stored deltas.
    """
    seen_before = {"oracle", "oracle+head", "graphflow", "kamera", "dense"}
    for source, destination in EDGES:
        edge = f"{source}:{destination}"
        cheap = [m for m in METHODS if m not in seen_before and measured.mean(m, "recompute", edge) <= 0.15]
        assert {"none", "kvcmas", "kvcomm", "attention+chosen"} <= set(cheap)
        assert min(cheap, key=lambda m: measured.kl(m, edge)) == "attention+chosen"


def test_a_threshold_leaves_most_of_the_reuse_and_little_of_the_error(measured: Measured) -> None:
    """Some θ reuses 70% of the tokens at 12% of rotation only's KL. Measured: 74% at 10% (θ .048)."""
    ours, none = measured.of("attention+head+chosen"), measured.of("none")
    tokens, blind = sum(r.tokens for r in ours), sum(r.kl for r in none)
    best = 0.0
    for theta in sorted(r.ehat for r in ours if r.ehat is not None):
        passed = [r for r in ours if r.ehat is not None and r.ehat <= theta]
        if sum(r.kl for r in passed) <= 0.12 * blind:
            best = max(best, sum(r.tokens * (1 - r.recompute) for r in passed) / tokens)
    assert best >= 0.7


def test_own_deltas_are_nearly_dense(measured: Measured) -> None:
    """A run that was seen before: the true delta at rank 32. Measured .06; energy kept of ΔK .89, of ΔV .81."""
    assert measured.ratio("oracle") <= 0.12
    assert 1 - measured.mean("oracle", "res_k") >= 0.83
    assert 1 - measured.mean("oracle", "res_v") >= 0.72


def test_prediction_is_worth_its_cost(measured: Measured) -> None:
    """Without this, recomputing the head alone would do. Measured: mean .32 against .67, better on 9 of 10 contexts."""
    assert measured.ratio("attention+head") < measured.ratio("head")
    contexts = sorted({r.context for r in measured.rows})

    def kl(method: str, context: str) -> float:
        return sum(r.kl for r in measured.of(method) if r.context == context)

    better = sum(kl("attention+head", c) < kl("head", c) for c in contexts)
    assert better >= 0.8 * len(contexts)


def test_ehat_says_how_wrong_a_prediction_is(measured: Measured) -> None:
    """The gate sees ê only. Measured: true error ÷ ê 1.25, rank correlation .92 over 30 transitions."""
    judged = [(r.tail_error, r.ehat) for r in measured.of("attention+head") if r.ehat is not None]
    assert len(judged) == 30
    assert 0.8 <= sum(true / ehat for true, ehat in judged) / len(judged) <= 1.4
    assert rank_correlation(*zip(*judged, strict=True)) >= 0.75


def test_the_default_threshold_lets_most_transitions_pass(measured: Measured) -> None:
    """θ must neither refuse everything nor accept everything. Measured: 77% of 30, at .10 of rotation only's KL."""
    accepted = [r.ehat is not None and r.ehat <= DEFAULT_THETA for r in measured.of("attention+head+chosen")]
    assert 0.55 <= sum(accepted) / len(accepted) <= 0.9


def test_every_method_is_measured_on_every_context(measured: Measured) -> None:
    """The head is exact, rotation only leaves all of the delta, and every figure is one."""
    assert len({(r.edge, r.context, r.method) for r in measured.rows}) == len(measured.rows) == 3 * 10 * len(METHODS)
    for row in measured.rows:
        assert all(x == x and x >= 0 for x in (row.kl, row.top1, row.kv_error, row.res_k, row.res_v))
    assert all(r.res_k == r.res_v == 1 for r in measured.of("none"))
    assert all(a.kv_error < b.kv_error for a, b in zip(measured.of("head"), measured.of("none"), strict=True))


def test_full_rank_true_delta_is_dense(runs: DenseRuns) -> None:
    """Nothing but the prediction may be approximate: with the true delta, logits are dense's. Measured 4e-5."""
    context = runs.workload.tests[0]
    exact = Oracle("exact", head=0, rank=10_000, dtype=torch.float32)
    case = runs.case("solver", "critic", context)
    past = runs.prefix("critic").then(exact.apply(case).run)
    forced = [*runs.prompt("critic", context).suffix, *runs.answer("critic", context).tokens[:-1]]
    _, logits = runs.model.extend(past, forced, ANSWER_TOKENS)
    _, dense = runs.model.extend(runs.prefix("critic").then(runs.run("critic", context)), forced, ANSWER_TOKENS)
    assert (logits - dense).abs().max() <= 1e-3
    torch.testing.assert_close(torch.log_softmax(dense, -1), runs.answer("critic", context).logp, atol=1e-3, rtol=0)


def test_the_head_is_what_dense_prefill_gives(runs: DenseRuns) -> None:
    """Recomputing the first tokens on top of the exact prefix must leave no error in them. Measured 2e-5."""
    context = runs.workload.tests[0]
    examples = Examples(tuple(runs.case("solver", "critic", c) for c in runs.workload.anchors[:2]))
    case = runs.case("solver", "critic", context)
    run = Predicted("attention+head", "attention", 32).learned(examples).apply(case).run
    assert case.head(32).tokens == 32
    assert run.tokens == case.dense.tokens
    for ours, dense in zip(run.rows(0, 32), case.dense.rows(0, 32), strict=True):
        torch.testing.assert_close(ours, dense, atol=1e-3, rtol=0)
    assert (run.k[1:, 32:] - case.dense.k[1:, 32:]).abs().max() > 0.1


def test_errors_stay_bounded_over_eight_agents_and_three_rounds(long_chain: list[ChainRow]) -> None:
    """As they are served, gate on: each hop starts from the cache that the one before it left, and none is as far from
    dense as the first agent's cache, moved once and not corrected. Measured (ten anchors, θ .048): at most .0018 of
    .0068; 59% of hops accepted. Without the gate seven of 23 hops are above, to agents that differ more."""
    blind = [r.kl for r in long_chain if (r.mode, r.hop) == ("uncorrected", 1)]
    first = sum(blind) / len(blind)
    hops = sorted({r.hop for r in long_chain})
    assert len(hops) == 23
    for hop in hops:
        kls = [r.kl for r in long_chain if (r.mode, r.hop) == ("gated", hop)]
        assert sum(kls) / len(kls) < first


def test_errors_do_not_pile_up_along_a_chain(chain: list[ChainRow]) -> None:
    """Four agents: the third hop must be far better than rotation alone, and chaining better than starting afresh.

    Measured at hops 1, 2, 3 (1e-3 nats): uncorrected 8.5, 13.5, 23.0; chained 2.0, 2.2, 7.2 (.31 of it at hop 3);
    context-free 9.0, 5.1, 12.8.
    """

    def kl(mode: str, hop: int) -> float:
        some = [r.kl for r in chain if (r.mode, r.hop) == (mode, hop)]
        assert len(some) == 10
        return sum(some) / len(some)

    assert kl("chained", 3) <= 0.5 * kl("uncorrected", 3)
    for hop in (1, 2, 3):
        assert kl("chained", hop) < kl("context-free", hop)
