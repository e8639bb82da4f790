"""Traces served by every method. If reuse were counted or composed wrongly here, every figure after it would be."""

import pytest
import torch
from tiny_model import text

from lmcache_kvcmas.evaluate.dense import Active
from lmcache_kvcmas.evaluate.methods import Knobs, build_methods
from lmcache_kvcmas.evaluate.runs import DenseRuns
from lmcache_kvcmas.evaluate.serve import TraceRow, TraceServer, examples_of
from lmcache_kvcmas.evaluate.traces import Call, Message, Trace
from lmcache_kvcmas.evaluate.transcripts import Transcriber, Transcript
from lmcache_kvcmas.spans import SpanKind

AGENTS = {"planner": text(201, 30), "solver": text(202, 45), "critic": text(203, 60)}


def trace(seed: int, words: int = 150, rounds: int = 1, tokens: int = 70, judge: object = None) -> Trace:
    """Three agents in turn; what each says (70 tokens: long enough to be shared) goes into the prompts behind it."""
    calls = []
    for number, agent in enumerate(list(AGENTS) * rounds):
        parts = [text(seed, words)]
        for earlier in range(number):
            parts += [f" w{earlier} said: ", earlier]
        user = Message("user", (*parts, f" now {text(300 + len(agent), 8)}"))
        calls.append(Call(agent, (Message("system", (AGENTS[agent],)), user), tokens))
    return Trace(f"t{seed}", "tiny", "test", tuple(calls), judge)  # type: ignore[arg-type]


def transcripts(tiny: DenseRuns, seeds: range, **how: int) -> list[Transcript]:
    scribe = Transcriber(tiny.model)
    return [scribe.transcript(trace(seed, **how)) for seed in seeds]


def test_a_transcript_is_what_dense_prefill_gives(tiny: DenseRuns) -> None:
    (one,) = transcripts(tiny, range(1, 2))
    for step in one.steps:
        whole, _ = tiny.model.extend(None, step.tokens)
        for a, b in zip(step.cache, whole, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
        assert step.cache.tokens == len(step.prompt) + len(step.answer.tokens) - 1
        again, logp = tiny.model.extend(None, step.tokens, len(step.answer.tokens))
        assert again.tokens == whole.tokens
        torch.testing.assert_close(torch.log_softmax(logp, -1), step.answer.logp, atol=1e-3, rtol=0)


def test_spans_take_what_the_steps_before_have(tiny: DenseRuns) -> None:
    """The context, and the answers of those before, token by token; the first agent takes nothing."""
    (one,) = transcripts(tiny, range(2, 3))
    assert one.steps[0].predicted == ()
    assert [len(s.predicted) >= 1 for s in one.steps[1:]] == [True, True]
    for step in one.steps:
        at = 0
        for span in step.spans:
            assert span.start == at
            at = span.end
            if span.kind is not SpanKind.COMPUTE:
                number, row = one.source(span)
                assert step.prompt[span.start : span.end] == one.steps[number].tokens[row : row + span.end - span.start]
    slots = {s.edge.slot for s in one.steps[2].predicted if s.edge is not None}
    assert slots >= {0, 1}
    assert one.steps[2].agent == "critic"


@pytest.fixture(scope="module")
def rows(tiny: DenseRuns) -> list[TraceRow]:
    methods = build_methods(
        ("none", "attention+head", "attention+head+chosen", "oracle", "dense", "epic"), Knobs(32, 16, 0.1)
    )
    learned = {
        edge: tuple(m.learned(some) for m in methods)
        for edge, some in examples_of(tiny.model, transcripts(tiny, range(10, 14)), 32).items()
    }
    return [r for t in transcripts(tiny, range(20, 23)) for r in TraceServer(tiny.model, t, methods, learned).rows()]


def test_every_hop_has_a_row_of_every_method(rows: list[TraceRow]) -> None:
    assert len(rows) == 3 * 2 * 6
    assert {(r.hop, r.edge) for r in rows} == {(1, "planner:solver"), (2, "solver:critic")}
    for row in rows:
        assert row.reuse == pytest.approx(1 - row.recompute)
        assert row.shared >= 150
        assert row.seconds > 0


def test_dense_is_dense_and_none_is_not(rows: list[TraceRow]) -> None:
    dense, none = ([r for r in rows if r.method == m] for m in ("dense", "none"))
    assert all(r.kl == pytest.approx(0, abs=1e-5) and r.recompute == 1 and r.exact for r in dense)
    assert all(r.kl > 1e-4 and r.recompute == 0 for r in none)


def test_true_deltas_follow_the_truth_at_every_hop(rows: list[TraceRow]) -> None:
    """Rank 32 of 16 channels is exact: errors of the hop before must not come into a stored delta."""
    assert all(r.kl == pytest.approx(0, abs=1e-5) for r in rows if r.method == "oracle")


def test_what_is_recomputed_is_counted(rows: list[TraceRow]) -> None:
    """Two runs, each with a head of 16 (context and earlier answers; the source's own answer), a tenth behind it."""
    head, chosen = ([r for r in rows if r.method == m] for m in ("attention+head", "attention+head+chosen"))
    for h, c in zip(head, chosen, strict=True):
        assert round(h.recompute * h.shared) == 2 * 16
        assert round(c.recompute * c.shared) == pytest.approx(2 * 16 + 0.1 * (c.shared - 2 * 16), abs=2)


def test_an_agent_that_asks_again_takes_its_own_cache(tiny: DenseRuns) -> None:
    """Second round: what the agent has read before is its own, not corrected once more."""
    (one,) = transcripts(tiny, range(30, 31), rounds=2, tokens=4)
    kinds = {s.kind for s in one.steps[4].spans}
    assert SpanKind.OWN in kinds
    methods = build_methods(("none", "dense"))
    rows = TraceServer(tiny.model, one, methods).rows()
    assert one.steps[3].exact == one.steps[3].cover > 0, "the first agent's own cache is exact"
    assert {r.hop for r in rows} == {1, 2, 3, 4}
    assert all(r.kl == pytest.approx(0, abs=1e-5) for r in rows if r.method == "dense")


def test_answers_are_each_methods_own(tiny: DenseRuns) -> None:
    """Dense's answer is right by definition; what blind reuse says differs, and is judged as it is."""
    scribe = Transcriber(tiny.model)
    said: list[str] = []
    plain = scribe.transcript(trace(40, tokens=8))
    right = plain.steps[-1].text

    def judge(answer: str) -> float:
        said.append(answer)
        return float(answer == right)

    one = scribe.transcript(trace(40, tokens=8, judge=judge))
    rows = TraceServer(tiny.model, one, build_methods(("none", "dense"))).rows()
    scores = {(r.method, r.hop): r.score for r in rows}
    assert scores["dense", 2] == 1
    assert scores["none", 1] is scores["dense", 1] is None
    last = next(r for r in rows if (r.method, r.hop) == ("none", 2))
    assert scores["none", 2] == float(last.exact)


def test_sampling_is_the_same_for_the_same_seed(tiny: DenseRuns) -> None:
    scribe = Transcriber(tiny.model)
    texts = [
        scribe.transcript(trace(50), temperature=t, seed=s).steps[0].text for t, s in ((1, 0), (1, 0), (1, 1), (0, 0))
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[1:])) == 3


def test_growing_a_batch_is_growing_each(tiny: DenseRuns) -> None:
    a, _ = tiny.model.extend(None, list(range(5, 25)))
    b = Active(a.k + 0.1, a.v - 0.1)
    grown, logp = tiny.model.grow([a, b], [7, 8, 9], 2)
    for past, whole, said in zip((a, b), grown, logp, strict=True):
        tail, logits = tiny.model.extend(past, [7, 8, 9], 2)
        torch.testing.assert_close(whole.k, past.then(tail).k, atol=1e-4, rtol=0)
        torch.testing.assert_close(said, torch.log_softmax(logits, -1), atol=1e-4, rtol=0)
