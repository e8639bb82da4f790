"""Several ranks, one verdict: whatever failed on one of them, all choose the same rows and run the same ranges."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lmcache_kvcmas.anchors import AnchorPool
from lmcache_kvcmas.choose import ChosenBefore, choose, stretches
from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors.judge import Judge, Started, Verdict, ranges_of
from lmcache_kvcmas.connectors.messages import Load
from lmcache_kvcmas.connectors.nested import NestedForward, Range
from lmcache_kvcmas.edges import Ready
from lmcache_kvcmas.gate import Reliability, ehat_of
from lmcache_kvcmas.predict import LayerPrediction, build_predictor
from lmcache_kvcmas.spans import Edge, Piece, Span, SpanKind
from lmcache_kvcmas.takeover import Prediction

LAYERS, RANKS = 3, 3
CPU = torch.device("cpu")
CONTEXT, OUTPUT = Edge("a", "b", 0), Edge("a", "b", 1)
FIRST = Span(SpanKind.PREDICTED, 40, 140, (Piece(40, 140, b"k", 0),), CONTEXT)
SECOND = Span(SpanKind.PREDICTED, 150, 210, (Piece(150, 210, b"k", 110),), OUTPUT)
LOAD = Load(
    "request",
    "tenant",
    tuple(range(20)),
    (Span(SpanKind.COMPUTE, 8, 40), FIRST, Span(SpanKind.COMPUTE, 140, 150), SECOND),
    tuple(tuple(range(1000 + a, 1000 + b)) for a, b in ((8, 40), (40, 140), (140, 150), (150, 210))),
)
SETTINGS = Settings(recompute_fraction=0.1, theta=0.5)


class Ranks:
    """An all-reduce over threads whose sums differ in their last bits from rank to rank, as real ones may."""

    world_size = RANKS

    def __init__(self) -> None:
        self._given: list[Tensor] = [torch.empty(0)] * RANKS
        self._barrier = threading.Barrier(RANKS, timeout=10)
        self._here = threading.local()

    def join(self, rank: int) -> None:
        self._here.rank = rank

    def all_reduce(self, input_: Tensor) -> Tensor:
        given = self._exchange(input_)
        return sum(given, torch.zeros_like(input_)) * (1 + 1e-6 * self._here.rank)

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor:
        return input_.copy_(self._exchange(input_)[src])

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        self._given[self._here.rank] = mine.clone()
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given


def reliability(span: Span, rank: int, spread: float = 1e-3) -> Reliability:
    """Of one rank's head: the doubts of others are elsewhere. Many are equal."""
    tokens = span.end - span.start
    found = Reliability(LAYERS, tokens)
    g = torch.Generator().manual_seed(100 * rank + span.start)
    for layer in range(1, LAYERS):
        k, v = torch.randn(2, tokens, 4, generator=g)
        doubt = spread * torch.randint(1, 4, (tokens,), generator=g)
        found.add(layer, LayerPrediction(None, None, doubt, 2 * doubt, None), k, v)
    return found


def predicted(rank: int, spans: Sequence[Span] = (FIRST, SECOND), anchors: int = 4, spread: float = 1e-3) -> Started:
    pool = AnchorPool(1)
    ready = Ready(build_predictor("none", pool), pool, anchors)
    found = [(Prediction(s, reliability(s, rank, spread), None), ready) for s in spans]
    return Started(found) if len(spans) == 2 else Started(found, 175, "missing_entry")


def all_judge(
    starts: Sequence[Started], settings: Settings = SETTINGS, load: Load = LOAD, judges: Sequence[Judge] = ()
) -> list[Verdict]:
    group = Ranks()
    judges = judges or [Judge(LAYERS, CPU) for _ in range(RANKS)]

    def one(rank: int) -> Verdict:
        group.join(rank)
        return judges[rank].judge(load, starts[rank], settings, group)

    with ThreadPoolExecutor(RANKS) as ranks:
        return list(ranks.map(one, range(RANKS)))


def same_ranges(verdicts: Sequence[Verdict], load: Load = LOAD) -> list[Range]:
    first, *others = [list(ranges_of(load, v)) for v in verdicts]
    assert all(other == first for other in others)
    return first


def rows_of(ranges: Sequence[Range], span: Span) -> list[int]:
    return [p - span.start for r in ranges for p in range(r.start, r.end) if span.start <= p < span.end]


def test_all_ranks_choose_what_one_with_all_heads_would() -> None:
    verdicts = all_judge([predicted(rank) for rank in range(RANKS)])
    ranges = same_ranges(verdicts)
    for span, judged in zip((FIRST, SECOND), verdicts[0].outcome.judged, strict=True):
        whole = reliability(span, 0)
        for rank in (1, 2):
            whole.terms += reliability(span, rank).terms
        rows = choose(whole.doubts(), int(0.1 * (span.end - span.start)))
        assert rows_of(ranges, span) == rows.tolist()
        assert judged.accepted
        assert judged.recomputed == len(rows) > 5
        assert judged.ehat == pytest.approx(ehat_of(whole.sums(rows)))
        assert judged.ehat < ehat_of(whole.sums()), "the worst rows are not judged"
    assert len({v.outcome.judged for v in verdicts}) == 1
    assert [t for r in ranges for t in r.tokens] == [1000 + p for r in ranges for p in range(r.start, r.end)]
    assert [r.start for r in ranges] == sorted(r.start for r in ranges)


@pytest.mark.parametrize("failing", range(RANKS))
@pytest.mark.parametrize("left", [(), (FIRST,)])
def test_a_rank_that_failed_takes_part(failing: int, left: tuple[Span, ...]) -> None:
    """It has no prediction, or one of two, to offer: the others drop theirs from there on, and heads are still run."""
    starts = [predicted(rank) for rank in range(RANKS)]
    starts[failing] = predicted(failing, left)
    verdicts = all_judge(starts)
    ranges = same_ranges(verdicts)
    assert {r.start for r in ranges} >= {8, 140}
    assert len(rows_of(ranges, FIRST)) == (10 if left else 0)
    assert rows_of(ranges, SECOND) == []
    dropped = SECOND if left else FIRST
    for rank, verdict in enumerate(verdicts):
        assert verdict.outcome.failed_from == (175 if rank == failing else dropped.start)
        assert verdict.outcome.judged == verdicts[0].outcome.judged


@pytest.mark.parametrize("fraction", [0.1, 1.0])
def test_too_few_anchors_on_one_rank_are_too_few(fraction: float) -> None:
    starts = [predicted(0), predicted(1, anchors=1), predicted(2)]
    verdicts = all_judge(starts, replace(SETTINGS, recompute_fraction=fraction))
    ranges = same_ranges(verdicts)
    assert {j.reason for v in verdicts for j in v.outcome.judged} == {"few_anchors"}
    assert [(r.start, r.end) for r in ranges] == [(8, 40), (40, 140), (140, 150), (150, 210)], "all of it in place"
    assert [j.recomputed for j in verdicts[0].outcome.judged] == [0, 0]


def test_of_what_the_gate_refuses_nothing_is_chosen() -> None:
    starts = [predicted(rank, spread=10.0) for rank in range(RANKS)]
    short = replace(SETTINGS, max_gap_tokens=60)
    verdicts = all_judge(starts, short)
    assert verdicts[0].outcome.failed_from == 40, "too long to be computed in place, although its tokens are known"
    assert [(r.start, r.end) for r in same_ranges(verdicts)] == [(8, 40)]
    assert [j.recomputed for j in verdicts[0].outcome.judged] == [0]


def test_nothing_is_chosen_without_tokens_or_a_fraction() -> None:
    """Without the nested forward, the scheduler sends no tokens."""
    blind = replace(LOAD, tokens=(LOAD.tokens[0], (), LOAD.tokens[2], ()))
    for settings, load in ((SETTINGS, blind), (replace(SETTINGS, recompute_fraction=0.0), LOAD)):
        verdicts = all_judge([predicted(rank) for rank in range(RANKS)], settings, load)
        assert [(r.start, r.end) for r in same_ranges(verdicts, load)] == [(8, 40), (140, 150)]
        whole = reliability(FIRST, 0)
        for rank in (1, 2):
            whole.terms += reliability(FIRST, rank).terms
        assert verdicts[0].outcome.judged[0].ehat == pytest.approx(whole.ehat())


def test_the_rest_of_a_span_is_computed_as_it_was_before() -> None:
    """vLLM has the beginning from an earlier request: the same prompt gets the same cache, and so the same answer."""
    judges = [Judge(LAYERS, CPU) for _ in range(RANKS)]
    first = replace(LOAD, tag=b"tag")
    whole = rows_of(same_ranges(all_judge([predicted(r) for r in range(RANKS)], load=first, judges=judges)), SECOND)
    rest = SECOND.clip(180, 210)
    later = replace(first, spans=(rest,), tokens=(LOAD.tokens[3][30:],))
    ready = predicted(0).predictions[0][1]

    def again(load: Load) -> list[int]:
        starts = [Started([(Prediction(rest, reliability(rest, r), None), ready)]) for r in range(RANKS)]
        verdicts = all_judge(starts, load=load, judges=judges)
        rows = rows_of(same_ranges(verdicts, load), rest)
        assert verdicts[0].outcome.judged[0].recomputed == len(rows)
        return rows

    assert again(later) == [row - 30 for row in whole if row >= 30]
    assert len(again(replace(later, tag=b"another plan"))) == 3


def test_what_was_chosen_is_forgotten_in_order() -> None:
    before = ChosenBefore(most=2 * 66)
    before.keep(b"a", 10, 90, [1, 2])
    before.keep(b"b", 10, 90, [3, 4])
    assert before.find(b"a", 10, 90) == [1, 2]
    before.keep(b"c", 10, 90, [5, 6])
    assert before.find(b"b", 10, 90) is None
    assert before.find(b"a", 12, 90) == [0], "of a shorter span that ends with it"
    assert before.find(b"a", 9, 90) is None, "of a longer one, nobody knows"
    before.keep(b"a", 5, 90, [0, 1, 2])
    assert before.find(b"c", 10, 90) is None
    assert before.find(b"a", 5, 90) == [0, 1, 2]
    before.keep(b"a", 50, 90, [7])
    assert before.find(b"a", 5, 90) == [0, 1, 2]


def test_what_is_not_a_number_is_refused() -> None:
    """A damaged base must not pass for one that nobody doubts."""
    starts = [predicted(rank) for rank in range(RANKS)]
    starts[1].predictions[0][0].reliability.terms[1, 0, 1, 70] = torch.nan
    verdicts = all_judge(starts)
    assert verdicts[2].outcome.judged[0].reason == "not_finite"
    assert (40, 140) in [(r.start, r.end) for r in same_ranges(verdicts)]


def test_of_equal_doubts_the_first_are_chosen() -> None:
    """A predictor whose doubt is the same for all tokens makes the head longer."""
    assert choose(torch.full((50,), 0.3), 4, head=2).tolist() == [2, 3, 4, 5]


def test_rows_that_touch_are_one_range() -> None:
    assert list(stretches([0, 1, 2, 5, 7, 8])) == [(0, 3), (5, 6), (7, 9)]
    assert list(stretches([])) == []


def test_each_range_gets_its_own_requests_blocks() -> None:
    nested = NestedForward.__new__(NestedForward)
    nested._block, nested._kernel_block = 32, 16
    one, other = (7, 3, 9), (5, 2)
    ranges = [Range([1], 70, one), Range([1, 2], 3, other), Range([1], 72, one), Range([1], 40, other)]
    tables = nested._block_tables(ranges).tolist()
    assert tables[0] == tables[2] == [14, 15, 6, 7, 18, 19]
    assert tables[1] == tables[3] == [10, 11, 4, 5, 0, 0]
