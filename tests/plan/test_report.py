"""What a client is told: tokens by origin add up to its prompt, and what was refused is not called reused."""

from lmcache_kvcmas.connectors.messages import Judged
from lmcache_kvcmas.plans import LabelledPlan, computed_instead, shorten, without_approximation
from lmcache_kvcmas.report import hop_report
from lmcache_kvcmas.spans import Edge, Lesson, Piece, Span, SpanKind

CONTEXT, OUTPUT = Edge("a", "b", 0), Edge("a", "b", 1)


def piece(start: int, end: int, exact: bool = False) -> tuple[Piece, ...]:
    return (Piece(start, end, b"k", 0, exact=exact),)


PLAN = LabelledPlan(
    spans=(
        Span(SpanKind.EXACT, 0, 50, piece(0, 50, True)),
        Span(SpanKind.COMPUTE, 50, 92),
        Span(SpanKind.PREDICTED, 92, 200, piece(92, 200), CONTEXT),
        Span(SpanKind.PREDICTED, 200, 300, piece(200, 300), OUTPUT),
    ),
    lessons=(
        Lesson(60, 200, CONTEXT, piece(60, 200), 0, 32, 0.0),
        Lesson(200, 300, OUTPUT, piece(200, 300), 0, 0, 0.0),
    ),
    agent="b",
)
YES = Judged(92, 200, CONTEXT, 0.03, 4, True, "accepted")
NO = Judged(200, 300, OUTPUT, 0.07, 4, False, "unreliable", computed=True)


def told(
    used: LabelledPlan, *judged: Judged, cause: str | None = None, chosen: int = 0
) -> tuple[int, int, int, int, int, str]:
    r = hop_report(PLAN, used, judged, 320, cause, chosen)
    assert r.exact_tokens + r.reused_tokens + r.recomputed_tokens + r.dense_tokens == 320
    return r.shared_tokens, r.reused_tokens, r.recomputed_tokens, r.exact_tokens, r.dense_tokens, r.decision


def test_accepted() -> None:
    assert told(PLAN, YES) == (240, 208, 32, 50, 30, "accepted")


def test_chosen_tokens_are_recomputed_not_reused() -> None:
    assert told(PLAN, YES, chosen=11) == (240, 197, 43, 50, 30, "accepted")


def test_partly_refused_and_computed_in_place() -> None:
    used = computed_instead(PLAN, {200})
    assert told(used, YES, NO) == (240, 108, 132, 50, 30, "partly: unreliable")


def test_all_refused_is_exact_and_a_lesson() -> None:
    used = computed_instead(PLAN, {92, 200})
    assert used.first_approximate is None
    first = Judged(92, 200, CONTEXT, 0.07, 4, False, "unreliable", computed=True)
    assert told(used, first, NO) == (240, 0, 240, 50, 30, "unreliable")


def test_half_a_refused_span_stays_approximate() -> None:
    """The engine had the span's beginning from an earlier request: nobody knows that it is exact."""
    assert computed_instead(PLAN, {128}).first_approximate == 92


def test_a_missing_entry() -> None:
    assert told(shorten(PLAN, 200), YES, cause="missing_entry")[1:] == (108, 32, 50, 130, "partly: missing_entry")
    assert told(without_approximation(PLAN), cause="missing_entry")[1:] == (0, 0, 50, 270, "missing_entry")


def test_learning_and_nothing_shared() -> None:
    learning = without_approximation(PLAN)
    assert hop_report(learning, learning, (), 320, None).decision == "learning"
    nothing = LabelledPlan()
    assert hop_report(nothing, nothing, (), 320, None).decision == "none"
