"""Any prompt, any records. Lost otherwise: the engine, to a plan it cannot carry out; or a wrong cache."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import Stored, World, check_plan, words

from lmcache_kvcmas.hints import Hints
from lmcache_kvcmas.layout import lay_out
from lmcache_kvcmas.plans import plan_tag, shorten
from lmcache_kvcmas.records import Record, Segment
from lmcache_kvcmas.spans import Piece

blocks = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 220)), min_size=0, max_size=6)
"""(text, length): the beginning of one of six texts."""
names = st.sampled_from([None, "a", "b"])


TEXTS = [words(seed, 220) for seed in range(6)]


def text(parts) -> np.ndarray:
    return np.array([t for seed, n in parts for t in TEXTS[seed][:n]], np.int32)


@st.composite
def records(draw, store: dict[bytes, Stored], number: int) -> Record:
    tokens = text(draw(blocks))
    n = len(tokens)
    cuts = sorted({0, n, *(min(n, x) for x in draw(st.lists(st.integers(0, 900), max_size=6)))})
    pieces = []
    leading = True
    for a, b in pairwise(cuts):
        kind = draw(st.sampled_from(["exact", "exact", "own", "delta", "exact delta", "hole"]))
        if kind == "hole":
            continue
        leading = leading and kind == "exact"
        chunk = b"%d:%d" % (number, a)
        store[chunk] = Stored(tokens[a:b], tokens[:a].tobytes(), kind == "exact")
        if "delta" in kind:
            store[b"d" + chunk] = store[chunk]
        delta = b"d" + chunk if "delta" in kind else None
        pieces.append(Piece(a, b, chunk, 0, delta, 0, "exact" in kind))
    marks = sorted({0, n, *(min(n, x) for x in draw(st.lists(st.integers(0, 900), max_size=4)))})
    slot, error2 = st.integers(-1, 4), st.sampled_from([0.0, 0.001])
    segments = tuple(Segment(a, b, draw(slot), draw(error2)) for a, b in pairwise(marks))
    prompt_tokens = draw(st.integers(0, n))
    return Record(b"r%d" % number, tokens, prompt_tokens, tuple(pieces), segments, draw(names), draw(names), "", number)


@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_every_plan_can_be_carried_out_and_kept(data):
    store: dict[bytes, Stored] = {}
    world = World(store=store)
    nested, learns = data.draw(st.booleans()), data.draw(st.booleans())
    head, max_gap = data.draw(st.sampled_from([0, 16, 32, 200])), data.draw(st.sampled_from([0, 60, 512]))
    world.with_planner(nested=nested, predictor_learns=learns, head=head, max_gap=max_gap)
    for i in range(data.draw(st.integers(0, 4))):
        world.index.add(data.draw(records(store, i)))
    hints = Hints(data.draw(names), data.draw(names), data.draw(names), data.draw(st.booleans()))
    tokens = text(data.draw(blocks))
    limit = data.draw(st.none() | st.integers(-5, 1000))
    anchors = data.draw(st.integers(1, 3))
    matches = world.index.match(tokens)
    plan = world.planner.plan(tokens, matches, hints, world.registry, lambda e: anchors, limit)
    check_plan(plan, tokens, store)
    assert plan.covered <= max(0, limit if limit is not None else len(tokens))
    assert sum(s.end - s.start for s in plan.segments) == len(tokens)
    if not hints.share:
        assert plan.first_approximate is None
    if not nested:
        assert all(s.pieces for s in plan.spans), "nothing asks for a nested forward"
    for a, b in pairwise(plan.spans):
        assert a.pieces or b.pieces, "what is computed in one go is one span"
    again = world.planner.plan(tokens, matches, hints, world.registry, lambda e: anchors, limit)
    assert again == plan, "asked again, the scheduler gets the same answer"

    short = shorten(plan, data.draw(st.integers(0, 1000)))
    check_plan(short, tokens, store)
    computed = data.draw(st.integers(0, len(tokens)))
    layout = lay_out(
        short,
        tokens[:computed],
        prompt_tokens=len(tokens),
        accepted=data.draw(st.booleans()),
        tag=plan_tag(short, lambda e: 1) or b"unused",
        base_key=lambda c, g: b"b" + c,
        delta_key=lambda c, g: b"d" + c,
    )
    record = Record(b"new", tokens[:computed], computed, layout.pieces, layout.segments)  # raises if contradictory
    assert record.stretches(0, computed) == ([(0, computed)] if computed else [])


@pytest.mark.parametrize("broken", [{"agent": "x" * 10_000}, {"agent": "\ud800"}, {"source": "…"}, {"workflow": ""}])
def test_strange_hints_do_not_stop_a_plan(world, broken):
    world.with_planner(predictor_learns=False)
    context = words(100, 400)
    world.serve(world.prompt("planner", context))
    plan = world.plan(world.prompt("solver", context), replace(Hints(), **broken))
    assert ("source" in broken) == (not plan.spans)
