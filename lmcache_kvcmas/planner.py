"""From matches to a plan: which tokens of a prompt are taken over, corrected, computed, and what can be learned.

Pure data in, pure data out; runs in the scheduler for every request that waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lmcache_kvcmas.agents import AgentRegistry
from lmcache_kvcmas.candidates import allowed, destination, next_run, role_prefixes, runs_of
from lmcache_kvcmas.fingerprint import SHORTEST_PREFIX, Tokens
from lmcache_kvcmas.hints import Hints
from lmcache_kvcmas.index import Match
from lmcache_kvcmas.labels import Labels
from lmcache_kvcmas.offers import Offer, Offers, Readiness
from lmcache_kvcmas.plans import LabelledPlan, without_approximation
from lmcache_kvcmas.spans import Edge, Lesson, Span, SpanKind


@dataclass(frozen=True, slots=True)
class Planner:
    """The rules by which prompts are covered; lengths in tokens.

    Attributes:
        min_run: Runs of at most this many are not worth a correction.
        head: Leading tokens of each run that the model computes itself.
        max_gap: A longer gap between two runs, or in front of the first, ends the cover.
        min_anchors: Anchors that an edge needs before it may predict.
        nested: Whether the engine can compute heads and gaps; without, cover ends at the first gap.
        predictor_learns: False for a predictor without anchors, for which every edge is ready.
    """

    min_run: int = 64
    head: int = 32
    max_gap: int = 512
    min_anchors: int = 2
    nested: bool = True
    predictor_learns: bool = True

    def plan(
        self,
        tokens: Tokens,
        matches: Sequence[Match],
        hints: Hints,
        registry: AgentRegistry,
        anchors_of: Callable[[Edge], int],
        limit: int | None = None,
        salt: str = "",
    ) -> LabelledPlan:
        """Cover ``tokens`` (``[T]`` int32) from the left with what ``matches`` found.

        Args:
            anchors_of: Number of anchors that an edge's pool holds.
            limit: The cover ends here at the latest; at most, and by default, T − 1: one token stays for the engine.

        Returns:
            A plan whose spans are contiguous from 0 and end with one that takes something over. If a part of the cover
            lacks anchors, or the hints forbid sharing, it holds only the leading exact spans, and lessons for all.
        """
        most = max(0, len(tokens) - 1)
        limit = most if limit is None else max(0, min(limit, most))
        agent = destination(tokens, matches, hints.agent, registry, salt)
        prefixes = role_prefixes(matches)
        readiness = Readiness(anchors_of if self.predictor_learns else None, self.min_anchors)
        offers = Offers(tokens, agent or "", registry, prefixes, readiness, self.head)
        spans, lessons = _front([m for m in matches if m.is_prefix], limit, agent or "", offers.labels)
        runs = runs_of(allowed(matches, hints, registry, prefixes), limit)
        tolerance = self.min_run if self.nested else 0
        at = spans[-1].end if spans else 0
        covering, learning = hints.share, False
        unready: list[Lesson] = []
        while (run := next_run(runs, at, self.min_run, tolerance, offers.rank)) is not None:
            covering = covering and self._bridge(spans, at, run.start)
            for offer in offers.take(run):
                short = offer.lesson.end - offer.lesson.start <= self.min_run
                if covering and not offer.ready:
                    learning = learning or not short
                    covering = self.nested or not short
                (unready if short and not offer.ready else lessons).append(offer.lesson)
                if covering:
                    self._cover(spans, offer)
            at = run.end
        while spans and spans[-1].kind is SpanKind.COMPUTE:
            spans.pop()
        plan = LabelledPlan(tuple(spans), tuple(lessons), agent, offers.labels.segments(len(tokens)))
        if learning or not hints.share:
            # A dense prefill is a chance to learn, for short parts too.
            every = sorted([*lessons, *unready], key=lambda lesson: lesson.start)
            return without_approximation(replace(plan, lessons=tuple(every)))
        return plan

    def _bridge(self, spans: list[Span], at: int, start: int) -> bool:
        """Compute what lies between the cover and the next run; False if the cover has to end."""
        if start > at:
            if not self.nested or start - at > self.max_gap:
                return False
            _compute(spans, at, start)
        return True

    def _cover(self, spans: list[Span], offer: Offer) -> None:
        lesson = offer.lesson
        start = lesson.start
        if not offer.ready:
            # Only a short part gets this far in a plan that is kept.
            _compute(spans, start, lesson.end)
            return
        if self.nested and lesson.head:
            start += lesson.head
            _compute(spans, lesson.start, start)
        if start < lesson.end:
            kind, edge = (SpanKind.OWN, None) if offer.own else (SpanKind.PREDICTED, lesson.edge)
            span = Span(kind, lesson.start, lesson.end, lesson.pieces, edge, lesson.offset, lesson.error2)
            spans.append(span.clip(start, lesson.end))


def _front(prefixes: list[Match], limit: int, agent: str, labels: Labels) -> tuple[list[Span], list[Lesson]]:
    """The agent's own prefix: exact as far as any record has it exact, then approximate as far as any has it at all."""
    exact = max(prefixes, key=lambda m: (_exact_end(m, limit), m.record.sequence), default=None)
    whole = max(prefixes, key=lambda m: (_whole_end(m, limit), m.record.sequence), default=None)
    if exact is None or whole is None:
        return [], []
    exact_end, whole_end = _exact_end(exact, limit), _whole_end(whole, limit)
    spans: list[Span] = []
    lessons: list[Lesson] = []
    if exact_end >= SHORTEST_PREFIX:
        spans.append(Span(SpanKind.EXACT, 0, exact_end, exact.record.clipped(0, exact_end, 0)))
        for part in exact.record.parts(0, exact_end):
            labels.add(exact, part, 0.0)
    at = spans[-1].end if spans else 0
    if whole_end - at >= SHORTEST_PREFIX:
        for part in whole.record.parts(at, whole_end):
            slot = labels.add(whole, part, part.error2)
            pieces = whole.record.clipped(part.start, part.end, 0)
            offset = part.start - part.slot_start
            spans.append(Span(SpanKind.OWN, part.start, part.end, pieces, None, offset, part.error2))
            edge = Edge(agent, agent, slot)
            lessons.append(Lesson(part.start, part.end, edge, pieces, offset, 0, part.error2))
    return spans, lessons


def _exact_end(match: Match, limit: int) -> int:
    at = 0
    for p in match.record.pieces:
        if p.start != at or not p.exact or p.delta is not None:
            break
        at = p.end
    return min(at, match.end, limit)


def _whole_end(match: Match, limit: int) -> int:
    stretches = match.record.stretches(0, min(match.end, limit))
    return stretches[0][1] if stretches and stretches[0][0] == 0 else 0


def _compute(spans: list[Span], start: int, end: int) -> None:
    if spans and spans[-1].kind is SpanKind.COMPUTE and spans[-1].end == start:
        start = spans.pop().start
    spans.append(Span(SpanKind.COMPUTE, start, end))
