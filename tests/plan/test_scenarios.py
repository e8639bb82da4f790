"""Workflows of agents, request by request. `World.plan` checks each plan against what is really stored."""

from dataclasses import replace

import numpy as np
import pytest
from plan_world import ASSISTANT, SYSTEM, USER, words

from lmcache_kvcmas.hints import Hints
from lmcache_kvcmas.offers import ELSEWHERE
from lmcache_kvcmas.plans import plan_tag, shorten, without_approximation
from lmcache_kvcmas.records import GENERATED
from lmcache_kvcmas.spans import Edge, Piece, SpanKind


def kinds(plan):
    return [s.kind.value for s in plan.spans]


def reused(plan):
    return sum(s.end - s.start for s in plan.spans if s.kind is not SpanKind.COMPUTE)


def test_four_agents_learn_twice_and_then_reuse(world):
    """Lost otherwise: the whole point. Two dense workflows teach every edge; the third reuses context and outputs."""
    first, second, third = (world.workflow(seed) for seed in (100, 200, 300))
    assert [kinds(s.plan) for s in first] == [[], [], [], []]
    assert all(set(kinds(s.plan)) <= {"exact"} for s in second)
    assert [s.plan.agent for s in second[1:]] == [s.plan.agent for s in first[1:]]
    assert len({s.plan.agent for s in third}) == 4
    for served in third[1:]:
        shared = len(served.tokens) - len(SYSTEM) - len(ASSISTANT) - len(USER) - 9
        assert "predicted" in kinds(served.plan)
        assert reused(served.plan) >= 0.6 * (shared - 340)
    # the source is the agent in front: the most recent record that covers the most
    sources = [{s.edge.source for s in x.plan.spans if s.edge} for x in third[1:]]
    agents = [{x.plan.agent} for x in third[:3]]
    assert sources == agents


def test_outputs_become_numbered_context(world):
    """Lost otherwise: anchors of different agents' outputs would be mixed."""
    *_, reflector = world.workflow(100)
    edges = {(x.edge.slot, x.end - x.start) for x in reflector.plan.lessons}
    assert {slot for slot, _ in edges} == {0, 1, 2, 3}
    slots = [s.slot for s in reflector.record.segments]
    assert slots == [0, 1, 2, 3, GENERATED]
    assert reflector.record.segments[-1].start == len(reflector.tokens)


def test_chain_error_grows_by_each_hop(world):
    """Lost otherwise: the gate on the whole chain would see only the last hop."""
    world.workflow(100), world.workflow(200)
    solver, critic, reflector = world.workflow(300)[1:]
    worst = [max(s.error2 for s in x.record.segments) for x in (solver, critic, reflector)]
    assert worst == pytest.approx([0.0004, 0.0008, 0.0012])
    assert max(s.error2 for s in reflector.plan.spans) == pytest.approx(0.0008)
    heads = [s for s in solver.record.segments if s.error2 == 0]
    assert heads[0].start == 0, "the role prompt and the head were computed"


def test_head_is_computed_once_per_run_not_per_slot(world):
    """Lost otherwise: time, on heads inside runs that need none."""
    world.workflow(100), world.workflow(200)
    critic = world.workflow(300)[2]
    run = next(x for x in critic.plan.lessons)
    assert run.head == 32 - len(USER), "template tokens in front belong to the run, too, but are an exact prefix here"
    later = [x.head for x in critic.plan.lessons if x.start > run.start and x.edge.slot == 1]
    assert later == [0], "the planner's output stands inside the solver's run"
    predicted = next(s for s in critic.plan.spans if s.kind is SpanKind.PREDICTED)
    assert predicted.start == run.start + run.head
    assert predicted.offset == run.offset + run.head
    assert run.offset <= 8, "offsets count from the context's beginning, not from the record's"


def test_loop_takes_the_own_prefix_exactly_and_the_rest_from_others(world):
    """Lost otherwise: an agent that comes back would be treated as a stranger, or its own prefix be approximated."""
    for seed in (100, 200, 300):
        context = words(seed, 400)
        first = world.serve(world.prompt("planner", context))
        header = words(seed + 1, 6)
        solver = world.serve(world.prompt("solver", context, header, first.output))
        back = np.concatenate(
            [
                world.prompt("planner", context),
                np.array(first.output, np.int32),
                np.array([*USER, *header, *solver.output, *words(seed + 2, 90), *ASSISTANT], np.int32),
            ]
        )
        again = world.serve(back)
        assert again.plan.spans[0].kind is SpanKind.EXACT
        assert again.plan.spans[0].end >= len(first.tokens) + len(first.output) - 1
        if seed != 100:
            assert again.plan.agent == first.plan.agent
    assert first.plan.agent is not None


def test_same_request_again_takes_over_everything_but_the_last_token(world):
    """Lost otherwise: a retry of a corrected request would be corrected, or learned from, a second time."""
    world.workflow(100), world.workflow(200)
    solver = world.workflow(300)[1]
    again = world.plan(solver.tokens)
    assert again.covered == len(solver.tokens) - 1
    assert set(kinds(again)) == {"exact", "own"}
    assert again.agent == solver.plan.agent
    assert all(x.edge.source == x.edge.destination for x in again.lessons)
    served = world.serve(solver.tokens)
    inside = [w for w in served.layout.writes if w.end <= len(solver.tokens) - 1]
    assert not inside, "what the store already holds is pointed at, not written again"


def test_fan_out_from_one_source(world):
    """Lost otherwise: only the first of many readers would profit."""
    for seed in (100, 200, 300):
        context = words(seed, 500)
        world.serve(world.prompt("planner", context))
        readers = [world.serve(world.prompt(role, context)) for role in ("solver", "critic", "reflector")]
    assert all("predicted" in kinds(r.plan) for r in readers)
    assert all(reused(r.plan) >= 440 for r in readers)


def test_fan_in_takes_runs_from_several_records(world):
    """Lost otherwise: a prompt that joins the work of several agents would reuse one of them only."""
    for seed in (100, 200, 300, 400):
        left, right = words(seed, 300), words(seed + 1, 350)
        a = world.serve(world.prompt("planner", left), generate=100)
        b = world.serve(world.prompt("solver", right), generate=100)
        parts = (left, a.output, words(seed + 2, 40), right, b.output)
        joined = world.serve(world.prompt("critic", *parts))
    spans = [s for s in joined.plan.spans if s.kind is SpanKind.PREDICTED]
    assert {s.edge.source for s in spans} == {a.plan.agent, b.plan.agent}
    assert {s.edge.slot for s in spans} == {0, 1, 2}
    assert joined.plan.covered >= len(joined.tokens) - 20
    computed = [s for s in joined.plan.spans if s.kind is SpanKind.COMPUTE]
    assert len(computed) == 4, "role, gap, and what each agent read between context and output; each with a head"


def test_one_edge_that_has_to_learn_makes_the_whole_request_learn(world):
    """Lost otherwise: a long part without anchors would wait for a nested forward, and never be learned."""
    for seed in (100, 200):
        context = words(seed, 300)
        left = world.serve(world.prompt("planner", context))
        world.serve(world.prompt("critic", context))
    context, other = words(300, 300), words(301, 300)
    world.serve(world.prompt("planner", context))
    right = world.serve(world.prompt("solver", other))
    ready, both = (world.plan(world.prompt("critic", *parts)) for parts in ((context,), (context, other)))
    assert "predicted" in kinds(ready)
    assert set(kinds(both)) <= {"exact"}
    assert len(both.lessons) == 2
    assert left.plan.agent == both.lessons[0].edge.source != both.lessons[1].edge.source
    assert world.registry.role_of(right.record).agent == both.lessons[1].edge.source


def test_only_outputs_are_passed_on(world):
    """Lost otherwise: pipelines that hand on answers, not contexts, would never find who wrote them."""
    for seed in (100, 200, 300, 400):
        writer = world.serve(world.prompt("planner", words(seed, 300)), generate=200)
        reader = world.serve(world.prompt("solver", writer.output))
    predicted = [s for s in reader.plan.spans if s.kind is SpanKind.PREDICTED]
    assert [s.edge for s in predicted] == [Edge(writer.plan.agent, reader.plan.agent, 1)]


def test_a_date_in_the_role_prompt_is_the_same_agent(world):
    """Lost otherwise: every day, or every request, would begin with edges that know nothing."""
    role = words(5, 200)
    agents = set()
    for day in range(4):
        dated = [*role[:10], 20, 21, 22 + day, 60 - day, *role[10:]]
        world.roles["critic"] = dated
        context = words(1000 + day, 400)
        world.serve(world.prompt("planner", context))
        agents.add(world.serve(world.prompt("critic", context)).plan.agent)
    assert len(agents) == 1


def test_own_run_behind_another_date_is_taken_over_without_correction(world):
    """Lost otherwise: an agent's own cache of a context would be corrected as if a stranger had left it."""
    role = words(5, 200)
    context = words(100, 400)
    world.roles["critic"] = [*role[:10], 20, *role[10:]]
    world.serve(world.prompt("planner", context))
    world.serve(world.prompt("critic", context))
    world.roles["critic"] = [*role[:10], 21, *role[10:]]
    again = world.plan(world.prompt("critic", context))
    assert "own" in kinds(again)
    assert "predicted" not in kinds(again)


@pytest.mark.parametrize("lie", ["planner", "critic", "nobody"])
def test_a_hint_that_lies_never_takes_another_agents_cache_uncorrected(world, lie):
    """Lost otherwise: correctness, to any client that names itself wrongly."""
    for seed in (100, 200, 300):
        context = words(seed, 400)
        world.serve(world.prompt("planner", context), hints=Hints(agent="planner"))
        world.serve(world.prompt("critic", context), hints=Hints(agent="critic"))
    liar = world.plan(world.prompt("solver", context), Hints(agent=lie))
    assert liar.agent == lie
    assert "own" not in kinds(liar)
    assert all(s.edge.source != s.edge.destination for s in liar.spans if s.edge)
    assert {x.edge for x in liar.lessons} <= {Edge(a, lie, 0) for a in ("planner", "critic", lie + ELSEWHERE)}


def test_source_and_workflow_hints_restrict_who_serves(world):
    """Lost otherwise: a client that knows better could not say so."""
    context = words(100, 400)
    world.serve(world.prompt("planner", context), hints=Hints(agent="planner", workflow="w1"))
    world.serve(world.prompt("critic", context), hints=Hints(agent="critic", workflow="w2"))
    tokens = world.prompt("solver", context)
    sources = {
        name: {x.edge.source for x in world.plan(tokens, hints).lessons}
        for name, hints in {
            "none": Hints(),
            "source": Hints(source="planner"),
            "workflow": Hints(workflow="w1"),
            "false source": Hints(source="nobody"),
            "false workflow": Hints(workflow="w9"),
        }.items()
    }
    assert sources == {
        "none": {"critic"},
        "source": {"planner"},
        "workflow": {"planner"},
        "false source": set(),
        "false workflow": set(),
    }


def test_an_unhinted_prompt_of_a_hinted_role_is_that_agent(world):
    """Lost otherwise: mixing clients with and without hints would split an agent's anchors."""
    for seed in (100, 200):
        context = words(seed, 400)
        world.serve(world.prompt("planner", context))
        hints = Hints(agent="critic") if seed == 100 else Hints()
        served = world.serve(world.prompt("critic", context), hints=hints)
    assert served.plan.agent == "critic"


def test_not_sharing_still_teaches(world):
    """Lost otherwise: a client that must have dense answers would get others, or starve the anchors."""
    world.workflow(100), world.workflow(200)
    context = words(300, 400)
    world.serve(world.prompt("planner", context))
    tokens = world.prompt("solver", context)
    assert "predicted" in kinds(world.plan(tokens))
    plan = world.plan(tokens, Hints(share=False))
    assert set(kinds(plan)) <= {"exact"}
    assert plan.lessons


def test_a_prompt_that_is_all_shared_leaves_one_token(world):
    """Lost otherwise: the engine dies when nothing is left to compute."""
    served = world.serve(world.prompt("planner", words(100, 400)))
    every = served.record.tokens
    assert world.plan(every).covered == len(every) - 1
    inner = every[80:380].copy()
    world.with_planner(predictor_learns=False)
    assert world.plan(inner).covered == len(inner) - 1


@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 63, 64, 65])
def test_short_prompts(world, n):
    """Lost otherwise: the engine, to a prompt shorter than a block."""
    world.serve(world.prompt("planner", words(100, 400)))
    tokens = world.prompt("planner", words(100, 400))[:n]
    plan = world.plan(tokens)
    assert plan.covered == (n - 1 if n > 16 else 0)


def test_without_nested_forward_cover_ends_at_the_first_gap_and_heads_are_predicted(world):
    """Lost otherwise: on an engine that cannot compute heads, a plan would ask for the impossible."""
    world.with_planner(predictor_learns=False, nested=False)
    context = words(100, 400)
    world.serve(world.prompt("planner", context))
    assert not world.plan(world.prompt("solver", context)).spans, "the role prompt is a gap"
    bare = np.array([*context, *ASSISTANT], np.int32)
    plan = world.plan(bare)
    assert kinds(plan) == ["predicted"]
    assert plan.spans[0].start == 0


def test_a_gap_longer_than_allowed_ends_the_cover(world):
    """Lost otherwise: first tokens would wait for a nested forward as long as a prefill."""
    world.with_planner(predictor_learns=False)
    context, other = words(100, 400), words(101, 400)
    world.serve(world.prompt("planner", context))
    world.serve(world.prompt("critic", other))
    near = world.plan(world.prompt("solver", context, words(5, 500), other))
    far = world.plan(world.prompt("solver", context, words(5, 520), other))
    assert [s.kind.value for s in near.spans].count("predicted") == 2
    assert [s.kind.value for s in far.spans].count("predicted") == 1
    assert len(far.lessons) == 2, "what lies behind is still compressed when it is kept"


def test_holes_in_a_record_end_its_runs(world):
    """Lost otherwise: a record whose chunks are partly evicted would be read where there is nothing."""
    world.with_planner(predictor_learns=False)
    context = words(100, 600)
    record = world.serve(world.prompt("planner", context)).record
    object.__setattr__(record, "pieces", tuple(p for p in record.pieces if p.start != 256))
    plan = world.plan(world.prompt("solver", context))
    moved = len(world.prompt("solver")) - len(world.prompt("planner"))
    taken = [(s.start - moved, s.end - moved) for s in plan.spans if s.kind is SpanKind.PREDICTED]
    assert taken[0][1] == 256
    assert taken[1][0] == 512, "no head: the run began earlier"
    assert world.plan(world.prompt("planner", context)).spans[0].end == 256


def test_tag_separates_what_came_about_differently(world):
    """Lost otherwise: blocks computed in one way would be served for another (error 1.1 in logits, measured)."""
    world.with_planner(predictor_learns=False)
    context = words(100, 400)
    world.serve(world.prompt("planner", context))
    plan = world.plan(world.prompt("solver", context))
    other_head = world.with_planner(head=16).plan(world.prompt("solver", context))
    tag = plan_tag(plan, lambda e: 1)
    assert len(tag) == 32
    assert tag == plan_tag(plan, lambda e: 1)
    assert tag != plan_tag(plan, lambda e: 2), "other anchors predict otherwise"
    assert tag != plan_tag(other_head, lambda e: 1)
    assert tag != plan_tag(shorten(plan, 300), lambda e: 1)
    assert plan_tag(without_approximation(plan), lambda e: 1) == b""


def test_shortened_plans_stay_plans(world):
    """Lost otherwise: when only part of the entries is found in time, the rest of the plan would be wrong."""
    world.with_planner(predictor_learns=False)
    context = words(100, 400)
    world.serve(world.prompt("planner", context))
    plan = world.plan(world.prompt("solver", context))
    for end in range(0, plan.covered + 2, 7):
        short = shorten(plan, end)
        assert short.covered <= end
        assert short.lessons == plan.lessons
        if end > plan.first_approximate:
            assert short.covered == min(end, plan.covered)
        assert not short.spans or short.spans[-1].pieces


def test_compressed_records_keep_one_base(world):
    """Lost otherwise: memory. Readers of a context keep differences to the one full-width copy, of depth one."""
    world.workflow(100), world.workflow(200)
    first, *readers = world.workflow(300)
    roots = {p.chunk for p in first.layout.pieces}
    for r in readers:
        context = [p for p in r.layout.pieces if p.delta is not None]
        assert context
        assert any(p.chunk in roots for p in context)
        for w in r.layout.writes:
            assert all(isinstance(p, Piece) and p.delta is None for p in getattr(w, "bases", ()))


def test_salted_worlds_never_meet(world):
    """Lost otherwise: one tenant's text would be confirmed, or served, to another."""
    context = words(100, 400)
    world.serve(world.prompt("planner", context), salt="a")
    for tokens in (world.prompt("planner", context), world.prompt("solver", context)):
        assert not world.plan(tokens, salt="b").lessons
        assert not world.plan(tokens, salt="b").spans
        assert not world.plan(tokens).spans


@pytest.mark.parametrize("change", [{"delta": b"d"}, {"exact": False}])
def test_what_is_compressed_or_approximate_is_never_called_exact(world, change):
    """Lost otherwise: the engine would share approximate blocks with requests that ask for exact ones."""
    context = words(100, 600)
    record = world.serve(world.prompt("planner", context)).record
    first, second, *rest = record.pieces
    world.store[b"d"] = world.store[second.chunk]
    object.__setattr__(record, "pieces", (first, replace(second, **change), *rest))
    plan = world.plan(world.prompt("planner", context))
    assert [(s.kind, s.start, s.end) for s in plan.spans] == [
        (SpanKind.EXACT, 0, first.end),
        (SpanKind.OWN, first.end, plan.covered),
    ]
