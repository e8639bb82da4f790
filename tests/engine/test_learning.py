"""Inside a real engine: what is learned, what the gate does with it, and what a full store costs (fp32)."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import Answer, Engine, engine
from workflow import Roles, contexts

pytestmark = pytest.mark.engine
BOUND = 1e-3  # see test_takeover.py
FORCED = [260, 1735, 282]
BUDGET = 0.25  # GiB of LMCache's CPU tier: some 5,800 tokens of this model in fp32


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Engine]:
    """Full rank, so that a stored delta is the true one; and no hot tier, so that it is read from the store."""
    settings = {"rank": 256, "hot_bytes": 0, "theta": 1.0}
    with engine(model, settings, lmcache={"max_local_cpu_size": BUDGET}) as running:
        yield running


def hop(llm: Engine, text: str, agent: str = "critic", **hints: bool) -> Answer:
    prompt = Roles.read().prompt(llm.llm.get_tokenizer(), agent, text)
    answer = llm.ask(prompt, 4, FORCED, hints=hints)
    llm.settle()
    return answer


def text_of(use: str, number: int) -> str:
    return [text for _, text in contexts(use)][number]


def kl(a: Answer, b: Answer) -> float:
    p, q = a.logits.log_softmax(-1), b.logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_a_true_delta_of_full_rank_is_dense(llm: Engine) -> None:
    """What a dense request left compressed gives the dense answer again, when nothing was cut off."""
    text = text_of("anchor", 0)
    hop(llm, text, "solver")
    dense = hop(llm, text)
    assert dense.report["decision"] == "learning"
    assert llm.connector.worker.learner.counts["compressed"] >= 1
    llm.forget_prefixes()
    again = hop(llm, text)
    assert again.report["reused_tokens"] > 100
    assert (again.logits - dense.logits).abs().max() <= BOUND


def test_an_edge_predicts_after_two_lessons_and_better_than_rotation(llm: Engine) -> None:
    texts = [t for _, t in contexts("anchor")]
    for text in texts[1:7]:
        hop(llm, text, "solver", share=False)
        hop(llm, text, share=False)
    book = llm.connector.worker._book
    corrected, rotated = 0.0, 0.0
    for number in (2, 3, 4):
        unseen = text_of("dev", number)
        hop(llm, unseen, "solver", share=False)
        prompt = Roles.read().prompt(llm.llm.get_tokenizer(), "critic", unseen)
        dense = llm.ask(prompt, 16, hints={"share": False, "capture": False})
        answers = []
        for predictor in ("attention", "none"):
            book._name = predictor
            book._known.clear()
            llm.forget_prefixes()
            answers.append(llm.ask(prompt, 16, dense.tokens, hints={"capture": False}))
        book._name = "attention"
        book._known.clear()
        assert [a.report["decision"] for a in answers] == ["accepted", "accepted"]
        assert 0 < answers[0].report["ehat"] < 0.2
        corrected, rotated = corrected + kl(dense, answers[0]), rotated + kl(dense, answers[1])
    # Measured below; a correction of the wrong tokens or the wrong sign is worse than none.
    assert corrected < 0.8 * rotated, f"{corrected:.4f} against {rotated:.4f}"
    print(f"KL of three hops, corrected {corrected:.5f}, rotation only {rotated:.5f}")


def test_what_the_gate_refuses_is_dense_and_a_lesson(llm: Engine) -> None:
    worker = llm.connector.worker
    text = text_of("dev", 4)
    hop(llm, text, "solver", share=False)
    llm.forget_prefixes()
    settings = worker._settings
    worker._settings = dataclasses.replace(settings, theta=1e-6, chain_theta=1e-6)
    try:
        learned = worker.learner.counts["learned"]
        refused = hop(llm, text)
    finally:
        worker._settings = settings
    assert refused.report["decision"] == "unreliable"
    assert refused.report["reused_tokens"] == 0
    assert refused.report["recomputed_tokens"] == refused.report["shared_tokens"], "in place, in the same step"
    assert worker.learner.counts["learned"] == learned + 1
    llm.forget_prefixes()
    tokens = Roles.read().prompt(llm.llm.get_tokenizer(), "critic", text)
    dense = llm.ask(tokens, 4, FORCED, hints={"share": False, "capture": False}, salt="nobody")
    assert (refused.logits - dense.logits).abs().max() <= BOUND


def test_a_refusal_in_the_last_step_is_a_lesson_too(llm: Engine) -> None:
    """A one-token response leaves before the gate has spoken: it must not claim reuse, nor cost the lesson."""
    worker = llm.connector.worker
    text = text_of("dev", 1)
    hop(llm, text, "solver", share=False)
    settings = worker._settings
    worker._settings = dataclasses.replace(settings, theta=1e-6, chain_theta=1e-6)
    try:
        learned, counted = worker.learner.counts["learned"], llm.scheduler.counts["tokens.reused"]
        answer = llm.ask(Roles.read().prompt(llm.llm.get_tokenizer(), "critic", text))
        llm.settle()
    finally:
        worker._settings = settings
    assert answer.report["decision"] == "planned"
    assert worker.learner.counts["learned"] == learned + 1
    assert llm.scheduler.counts["tokens.reused"] == counted
    assert llm.scheduler.counts["decision.unreliable"] > 0


def test_without_a_nested_forward_gaps_end_the_reuse(llm: Engine) -> None:
    """An engine that cannot compute heads still takes runs over, whole, if nothing has to be computed in front."""
    text = text_of("dev", 0)
    hop(llm, text, "solver", share=False)
    llm.forget_prefixes()
    llm.scheduler.set_nested(False)
    try:
        answer = hop(llm, text, capture=False)
    finally:
        llm.scheduler.set_nested(True)
    assert answer.report["recomputed_tokens"] == 0
    assert answer.report["reused_tokens"] == answer.report["shared_tokens"] > 150
    assert bool(torch.isfinite(answer.logits).all())


def test_a_full_store_evicts_and_answers_stay_right(llm: Engine) -> None:
    """More than the budget goes through: bytes stay below it, records that lost entries are forgotten."""
    store, scheduler = llm.connector.worker.store, llm.scheduler
    for _, text in list(contexts("dev"))[5:10]:
        for agent in ("solver", "critic", "reflector"):
            hop(llm, text, agent)
            stats = store.stats()
            assert stats.bytes_used <= stats.bytes_budget <= BUDGET * 2**30
    for _, text in list(contexts("anchor"))[9:16]:
        hop(llm, text, "planner")
        assert store.stats().bytes_used <= BUDGET * 2**30
    assert store.stats().evictions > 0
    assert scheduler.counts["records_lost"] > 0
    scheduler._library.check_integrity()
    held = {k for r in scheduler._library._index for p in r.pieces for k in (p.chunk, p.delta) if k is not None}
    gone = [key for key in held if not store.contains(key)]
    assert not gone, "what the scheduler plans with is there"
    text = text_of("dev", 0)
    tokens = Roles.read().prompt(llm.llm.get_tokenizer(), "reflector", text)
    ours = llm.ask(tokens, 4, FORCED, hints={"capture": False})
    assert len(ours.tokens) == 4
    assert bool(torch.isfinite(ours.logits).all())
