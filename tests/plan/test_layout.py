"""What is kept. Lost otherwise: memory (everything at full width), or correctness (pieces that name the wrong rows)."""

import numpy as np
import pytest
from plan_world import words

from lmcache_kvcmas.layout import ChunkWrite, DeltaWrite, lay_out
from lmcache_kvcmas.plans import LabelledPlan, shorten, without_approximation
from lmcache_kvcmas.records import GENERATED, Segment
from lmcache_kvcmas.spans import Edge, Lesson, Piece, Span, SpanKind

EDGE = Edge("a", "b", 1)


def base(start, end, chunk=b"root", row=0, **more):
    return Piece(start, end, chunk, row, **more)


def plan():
    """[0,50) exact, [50,90) computed, [90,300) predicted, [300,340) gap and head, [340,440) own."""
    predicted = (base(60, 200, row=10, delta=b"d", delta_row=3, exact=False), base(200, 300, b"root2"))
    own = (base(330, 440, b"mine", delta=b"dm", exact=False),)
    return LabelledPlan(
        (
            Span(SpanKind.EXACT, 0, 50, (base(0, 50, b"own"),)),
            Span(SpanKind.COMPUTE, 50, 90),
            Span(SpanKind.PREDICTED, 90, 300, tuple(p.clip(90, 300) for p in predicted), EDGE, 32, 0.001),
            Span(SpanKind.COMPUTE, 300, 340),
            Span(SpanKind.OWN, 340, 440, tuple(p.clip(340, 440) for p in own), None, 10, 0.002),
        ),
        (
            Lesson(60, 300, EDGE, predicted, 2, 30, 0.001),
            Lesson(330, 440, Edge("b", "b", 2), own, 0, 10, 0.002),
        ),
        "b",
        (
            Segment(0, 60, 0),
            Segment(60, 300, 1, 0.001),
            Segment(300, 330, 1),
            Segment(330, 440, 2, 0.002),
            Segment(440, 450, 2),
        ),
    )


def lay(p, n=500, prompt=450, accepted=True, seed=1, **more):
    options = {"base_key": lambda c, g: b"b" + c, "delta_key": lambda c, g: b"d" + c, "ehat2": {0: 0.0004}, "tag": b"t"}
    return lay_out(p, np.array(words(seed, n), np.int32), prompt_tokens=prompt, accepted=accepted, **(options | more))


def shape(layout):
    return [(type(w).__name__[0], w.start, w.end) for w in layout.writes]


def check(layout, n):
    at = 0
    for p in layout.pieces:
        assert p.start == at < p.end
        at = p.end
    assert at == n, "every token has a piece"
    assert [s.start for s in layout.segments] == [0, *(s.end for s in layout.segments)][:-1]
    assert layout.segments[-1].end == n
    assert len({w.key for w in layout.writes}) == len(layout.writes)
    for w in layout.writes:
        if isinstance(w, DeltaWrite):
            assert [p.start for p in w.bases] == [w.start, *(p.end for p in w.bases)][:-1]
            assert w.bases[-1].end == w.end


def test_accepted_plan():
    layout = lay(plan())
    check(layout, 500)
    assert shape(layout) == [("C", 50, 90), ("D", 90, 300), ("C", 300, 340), ("C", 440, 500)]
    exact = [(p.start, p.end) for p in layout.pieces if p.exact]
    assert exact == [(0, 50), (50, 90)], "what is computed behind a prediction is not exact"
    delta = layout.writes[1]
    assert delta.lesson == 0
    assert delta.bases == (base(90, 200, row=40, exact=False), base(200, 300, b"root2")), "depth one: roots only"
    key = delta.key
    assert layout.pieces[2:4] == (
        Piece(90, 200, b"root", 40, key, 0, False),
        Piece(200, 300, b"root2", 0, key, 110, False),
    )
    assert layout.pieces[5] == base(340, 440, b"mine", row=10, delta=b"dm", delta_row=10, exact=False)
    assert layout.segments == (
        Segment(0, 60, 0),
        Segment(60, 90, 1),
        Segment(90, 300, 1, pytest.approx(0.0014)),
        Segment(300, 330, 1),
        Segment(330, 340, 2),
        Segment(340, 440, 2, 0.002),
        Segment(440, 450, 2),
        Segment(450, 500, GENERATED),
    )


def test_dense_request_with_lessons():
    """It teaches, and is kept compressed; what stands at full width is exact, and there is no error."""
    layout = lay(without_approximation(plan()), accepted=False, tag=b"")
    check(layout, 500)
    assert shape(layout) == [("C", 50, 90), ("D", 90, 300), ("C", 300, 340), ("D", 340, 440), ("C", 440, 500)]
    assert all(p.exact == (p.delta is None) for p in layout.pieces)
    assert not any(s.error2 for s in layout.segments)


def test_rejected_plan_is_dense_whatever_its_spans_say():
    """Lost otherwise: a gate's refusal would be kept as if the correction had been used."""
    assert lay(plan(), accepted=False) == lay(without_approximation(plan()), accepted=False)


def test_dense_first_agent():
    layout = lay(LabelledPlan(), n=600, accepted=False, chunk_tokens=256)
    check(layout, 600)
    assert shape(layout) == [("C", 0, 256), ("C", 256, 512), ("C", 512, 600)]
    assert all(p.exact for p in layout.pieces)
    assert layout.segments == (Segment(0, 450, 0), Segment(450, 600, GENERATED))


@pytest.mark.parametrize("n", [0, 1, 49, 50, 51, 89, 90, 91, 154, 155, 300, 339, 449, 450])
def test_a_request_that_ended_early_keeps_what_was_computed(n):
    """Lost otherwise: pieces of tokens that were never computed, after an abort."""
    layout = lay(plan(), n=n)
    if n:
        check(layout, n)
    else:
        assert layout.pieces == ()
    assert all(w.end <= n for w in layout.writes)
    deltas = [w for w in layout.writes if isinstance(w, DeltaWrite)]
    assert bool(deltas) == (n - 90 > 64), "at most 64 tokens are not worth a difference"


def test_shortened_plan():
    """What the cover lost was computed over approximate tokens: kept as a difference, without an own error."""
    layout = lay(shorten(plan(), 400))
    check(layout, 500)
    assert shape(layout)[-1] == ("C", 400, 500), "40 tokens of a run are not worth a difference"
    assert [s for s in layout.segments if s.slot == 2][1] == Segment(340, 400, 2, 0.002)


def test_keys_name_content_and_how_it_came_about():
    """Lost otherwise: one cache would be written over another, or the same one twice."""
    dense = lay(LabelledPlan(), accepted=False)
    assert dense == lay(LabelledPlan(), accepted=False, tag=b"other"), "the tag says nothing of exact content"
    longer = lay(LabelledPlan(), n=900, prompt=900, accepted=False)
    other = lay(LabelledPlan(), accepted=False, seed=2)
    assert dense.writes[0] == longer.writes[0], "equal prefixes share their chunks"
    assert not {w.key for w in dense.writes} & {w.key for w in other.writes}
    a, b = lay(plan(), tag=b"a"), lay(plan(), tag=b"b")
    same = [x.key == y.key for x, y in zip(a.writes, b.writes, strict=True)]
    assert same == [True, False, False, False], "only what was computed in front of the first prediction is shared"
    dense_keys = {w.key for w in lay(without_approximation(plan()), accepted=False).writes}
    assert {w.key for w in a.writes} & dense_keys == {a.writes[0].key}


def test_approximate_content_without_a_tag_is_refused():
    with pytest.raises(ValueError, match="tag"):
        lay(plan(), tag=b"")


def test_no_chunk_is_exact_in_one_half_only():
    spans = (Span(SpanKind.OWN, 100, 120, (base(100, 120),)),)
    layout = lay(LabelledPlan((Span(SpanKind.COMPUTE, 0, 100), *spans)), n=200, prompt=200)
    assert [(w.start, w.end, isinstance(w, ChunkWrite)) for w in layout.writes] == [(0, 100, True), (120, 200, True)]
    assert [p.exact for p in layout.pieces] == [True, False, False]
