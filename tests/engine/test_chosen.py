"""Inside a real engine: the tokens that the anchors disagree about most are computed anew, and nothing else (fp32)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Answer, Engine, engine
from reference import Cache, Reference, joined, rows
from torch import Tensor
from workflow import Roles, contexts

from lmcache_kvcmas.connectors.messages import Load
from lmcache_kvcmas.connectors.nested import Range
from lmcache_kvcmas.spans import Span, SpanKind

pytestmark = pytest.mark.engine
BOUND = 1e-3  # see test_takeover.py
FORCED = [260, 1735, 282, 253]
TEXTS = [text for _, text in contexts("dev")]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Engine]:
    """An edge that has learned from four contexts, whatever its gate thinks of them."""
    with engine(model, {"recompute_fraction": 0.1, "theta": 1.0}) as running:
        for _, text in list(contexts("anchor"))[:4]:
            for agent in ("solver", "critic"):
                running.ask(prompt(running, agent, text), hints={"share": False})
        running.settle()
        yield running


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def prompt(llm: Engine, agent: str, text: str) -> list[int]:
    return Roles.read().prompt(llm.llm.get_tokenizer(), agent, text)


@dataclass
class Watched:
    """What the worker was given, and what it had the model compute."""

    loads: list[Load] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)

    @property
    def span(self) -> Span:
        (span,) = [s for s in self.loads[-1].spans if s.kind is SpanKind.PREDICTED]
        return span

    @property
    def chosen(self) -> list[int]:
        """Positions inside the predicted span that were computed."""
        return [p for r in self.ranges for p in range(r.start, r.end) if self.span.start <= p < self.span.end]


@pytest.fixture
def watched(llm: Engine, monkeypatch: pytest.MonkeyPatch) -> Watched:
    found, worker = Watched(), llm.connector.worker
    step, run = worker.step, worker.nested.run

    def stepping(work: Any) -> None:
        found.loads += work.loads
        step(work)

    def running(ranges: Sequence[Range]) -> None:
        found.ranges += ranges
        run(ranges)

    monkeypatch.setattr(worker, "step", stepping)
    monkeypatch.setattr(worker.nested, "run", running)
    return found


def settings(llm: Engine, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Other settings, on both sides, for one test. The planner keeps its own."""
    for side in (llm.connector.worker, llm.scheduler):
        monkeypatch.setattr(side, "_settings", replace(side._settings, **changes))


def hop(llm: Engine, text: str, tokens: int = 5) -> tuple[list[int], list[int], Answer]:
    """The prompts of a source and of the agent that takes its cache over, and what that one says."""
    source, destination = prompt(llm, "solver", text), prompt(llm, "critic", text)
    llm.ask(source, hints={"share": False})
    llm.forget_prefixes()
    return source, destination, llm.ask(destination, tokens, FORCED[: tokens - 1], hints={"capture": False})


def by_hand(
    reference: Reference, predictor: Any, span: Span, source: list[int], tokens: list[int]
) -> tuple[Cache, Tensor]:
    """The span's cache, rotated and corrected, before any of it is computed anew; and each token's doubt ``[T]``."""
    size = span.end - span.start
    (at,) = [i for i in range(len(source)) if source[i : i + size] == tokens[span.start : span.end]]
    whole, _ = reference.extend(None, source)
    k, v = rows(whole, at, at + size)
    free, _ = reference.moved((k, v), -torch.arange(at, at + size))
    layers, heads, _, dim = k.shape
    offsets = torch.arange(span.offset, span.offset + size)
    new_k, new_v, doubts = free.clone(), v.clone(), torch.zeros(size)
    for layer in range(1, layers):
        flat_k, flat_v = (x[layer].transpose(0, 1).reshape(size, -1) for x in (free, v))
        said = predictor.layer(layer, flat_k, flat_v, offsets)
        new_k[layer] += said.delta_k.view(size, heads, dim).transpose(0, 1)
        new_v[layer] += said.delta_v.view(size, heads, dim).transpose(0, 1)
        doubts += said.spread_k / flat_k.square().sum() + said.spread_v / flat_v.square().sum()
    return reference.moved((new_k, new_v), torch.arange(span.start, span.end)), doubts


def check_counts(got: Answer, tokens: list[int], span: Span, chosen: int) -> None:
    """Of what is shared, the span but for the chosen tokens is reused; they and the head are recomputed."""
    report, size = got.report, span.end - span.start
    head = report["shared_tokens"] - size  # its first tokens may belong to the agent's own prefix
    assert 0 < head <= 32
    assert report["reused_tokens"] == size - chosen
    assert report["recomputed_tokens"] == head + chosen
    origins = ("reused", "recomputed", "exact", "dense")
    assert sum(report[f"{origin}_tokens"] for origin in origins) == len(tokens)


def test_the_tokens_in_doubt_are_computed_on_top_of_the_rest(
    llm: Engine, reference: Reference, watched: Watched
) -> None:
    source, tokens, got = hop(llm, TEXTS[0])
    span, size = watched.span, watched.span.end - watched.span.start
    ((tenant, edge),) = {(load.tenant, span.edge) for load in watched.loads}
    predictor = llm.connector.worker._book.ready(tenant, edge).predictor
    taken, doubts = by_hand(reference, predictor, span, source, tokens)

    count = int(0.1 * size + 1e-6)
    assert len(watched.chosen) == count > 10
    windows = {end: float(doubts[max(0, end - 16) : end].sum()) for end in range(size, 0, -16)}
    touched = {end for end in windows for p in watched.chosen if end - 16 <= p - span.start < end}
    assert len(touched) == -(-count // 16) > 1
    best = max(doubt for end, doubt in windows.items() if end not in touched)
    assert min(windows[end] for end in touched) >= best * (1 - 1e-3), "those that the anchors disagree about most"
    check_counts(got, tokens, span, count)

    front, _ = reference.extend(None, tokens[: span.start])
    before = joined(front, taken)
    for past, near in ((reference.recomputed(before, tokens[: span.end], watched.chosen), True), (before, False)):
        logits = reference.extend(past, [*tokens[span.end :], *FORCED])[1][-5:]
        assert ((got.logits - logits).abs().max() <= BOUND) == near
        print(f"logits off by {(got.logits - logits).abs().max():.2g}")


def test_with_a_fraction_of_0_only_the_head_is_computed(
    llm: Engine, watched: Watched, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(llm, monkeypatch, recompute_fraction=0.0)
    source, tokens, got = hop(llm, TEXTS[1])
    span = watched.span
    assert watched.chosen == []
    check_counts(got, tokens, span, 0)
    predictor = llm.connector.worker._book.ready(watched.loads[-1].tenant, span.edge).predictor
    taken, _ = by_hand(reference, predictor, span, source, tokens)
    past = joined(reference.extend(None, tokens[: span.start])[0], taken)
    logits = reference.extend(past, [*tokens[span.end :], *FORCED])[1][-5:]
    assert (got.logits - logits).abs().max() <= BOUND


def test_an_answer_of_one_token_counts_what_is_planned(llm: Engine, watched: Watched) -> None:
    """It leaves before the workers have said what they did; the counts are those of the load, and the metrics' too."""
    before = llm.scheduler.counts.copy()
    _, tokens, got = hop(llm, TEXTS[2], tokens=1)
    size = watched.span.end - watched.span.start
    assert got.report["decision"] == "planned"
    check_counts(got, tokens, watched.span, int(0.1 * size + 1e-6))
    llm.settle()
    assert llm.scheduler.counts["tokens.reused"] - before["tokens.reused"] == size - int(0.1 * size + 1e-6)


def test_of_a_refused_span_no_token_is_chosen(llm: Engine, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too long to be computed in place: vLLM does, although the worker knows its tokens."""
    settings(llm, monkeypatch, theta=1e-6, chain_theta=1e-6, max_gap_tokens=64)
    _, tokens, got = hop(llm, TEXTS[3])
    assert watched.chosen == []
    assert got.report["decision"] == "unreliable"
    assert got.report["reused_tokens"] == 0
    dense = llm.ask(tokens, 5, FORCED, hints={"share": False, "capture": False}, salt="nobody")
    assert (got.logits - dense.logits).abs().max() <= BOUND


def test_what_was_chosen_for_one_request_serves_the_next(llm: Engine, watched: Watched) -> None:
    """vLLM keeps the blocks with the tokens that were computed anew, and a captured hop can be taken over further."""
    _, tokens, first = hop(llm, TEXTS[4])
    loads = len(watched.loads)
    again = llm.ask(tokens, 5, FORCED)
    assert again.cached_tokens >= len(tokens) // 128 * 128
    assert len(watched.loads) <= loads + 1
    assert (again.logits - first.logits).abs().max() <= BOUND
    llm.forget_prefixes()
    own = llm.ask(tokens, 5, FORCED, hints={"capture": False})
    assert own.report["reused_tokens"] > 100
    p, q = first.logits.log_softmax(-1), own.logits.log_softmax(-1)
    divergence = float((p.exp() * (p - q)).sum(-1).mean())
    print(f"captured and read again: KL {divergence:.6f}")
    assert divergence < 1e-3
