"""What can be said and done about a plan once it exists: its labels, its tag, a shorter form of it."""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

import msgspec
from blake3 import blake3

from lmcache_kvcmas.records import Segment
from lmcache_kvcmas.spans import Edge, Plan, Span, SpanKind

APPROXIMATE = frozenset({SpanKind.OWN, SpanKind.PREDICTED})


@dataclass(frozen=True, slots=True)
class LabelledPlan(Plan):
    """A plan that also says which agent output each token of the prompt belongs to."""

    segments: tuple[Segment, ...] = ()
    """Label every token of the prompt, in prompt positions. ``error2`` is that of the sources, before this hop."""


def exact_spans(plan: Plan) -> int:
    """How many spans stand in front of the first that is not EXACT."""
    return next((i for i, s in enumerate(plan.spans) if s.kind is not SpanKind.EXACT), len(plan.spans))


def without_approximation(plan: LabelledPlan) -> LabelledPlan:
    """The plan's leading exact spans, and all of its lessons: what a request follows that its gate refused."""
    return replace(plan, spans=plan.spans[: exact_spans(plan)])


def computed_instead(plan: LabelledPlan, refused: Set[int]) -> LabelledPlan:
    """The plan whose predicted spans that start at one of ``refused`` were computed by the model instead.

    A span of which only the rest was refused stays approximate: the engine had its beginning from somewhere else.
    """
    spans = tuple(
        Span(SpanKind.COMPUTE, s.start, s.end) if s.kind is SpanKind.PREDICTED and s.start in refused else s
        for s in plan.spans
    )
    return replace(plan, spans=spans)


def shorten(plan: LabelledPlan, end: int) -> LabelledPlan:
    """The plan whose cover ends at ``end`` or earlier (COMPUTE never comes last). Lessons stay."""
    spans = [s if s.end <= end else s.clip(s.start, end) for s in plan.spans if s.start < end]
    while spans and spans[-1].kind is SpanKind.COMPUTE:
        spans.pop()
    return replace(plan, spans=tuple(spans))


def plan_tag(plan: Plan, version_of: Callable[[Edge], int]) -> bytes:
    """32 bytes that two requests share only if their approximate caches come about in the same way.

    Names every approximate span (kind, bounds, entries and rows, edge and ``version_of`` its anchors) and every range
    that is computed behind the first of them. The tokens of a predicted span that are recomputed need no name: they are
    chosen by the prediction, which follows from what is named, and by settings that all requests of a process share
    (`choose.ChosenBefore` for spans whose beginning vLLM has already). Empty when the plan approximates nothing.
    """
    first = plan.first_approximate
    if first is None:
        return b""
    named = []
    for s in plan.spans:
        if s.end <= first:
            continue
        pieces = [[p.start, p.end, p.chunk, p.row, p.delta, p.delta_row] for p in s.pieces]
        edge = None if s.edge is None else [*s.edge, version_of(s.edge)]
        named.append([s.kind.value, s.start, s.end, s.offset, pieces, edge])
    return blake3(msgspec.msgpack.encode(named)).digest()
