"""How agents work together: who reads what. A wrong order would measure the reuse of runs that no two agents share."""

from itertools import takewhile

import pytest

from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.evaluate.frameworks import FRAMEWORKS, MAX_AGENTS, Agent, Framework, Task, build_trace
from lmcache_kvcmas.evaluate.traces import Call, Part, Trace

TEAM = tuple(Agent(f"a{i}", f"You are a{i}.", f"Do {i}.") for i in range(8))
TASK = Task("t", "w", "dev", "Context.", TEAM, "What is it?", judge=lambda answer: float(answer == "x"))
ALL = [
    *(Framework(name, agents) for name in FRAMEWORKS for agents in range(2, MAX_AGENTS + 1)),
    *(Framework("loop", agents, rounds) for agents in (2, 3, 8) for rounds in (2, 3, 4)),
]


def read(call: Call) -> list[int]:
    """Earlier calls whose answers stand in it."""
    return [part for message in call.messages for part in message.parts if isinstance(part, int)]


def shape(trace: Trace) -> list[tuple[str | None, list[int]]]:
    return [(call.agent, read(call)) for call in trace.calls]


def test_sequential_agents_read_all_that_was_said() -> None:
    trace = build_trace(TASK, Framework("sequential", 4))
    assert shape(trace) == [("a0", []), ("a1", [0]), ("a2", [0, 1]), ("a7", [0, 1, 2])]


def test_a_loop_goes_round_the_team() -> None:
    trace = build_trace(TASK, Framework("loop", 2, 2))
    assert shape(trace) == [("a0", []), ("a7", [0]), ("a0", [0, 1]), ("a7", [0, 1, 2])]
    headings = [part for part in trace.calls[-1].messages[1].parts if isinstance(part, str) and "##" in part]
    assert headings == ["\n\n## a0\n", "\n\n## a7\n", "\n\n## a0, round 2\n"]


def test_fan_in_reads_apart_and_joins_at_the_end() -> None:
    trace = build_trace(TASK, Framework("fan-in", 4))
    assert shape(trace) == [("a0", []), ("a1", []), ("a2", []), ("a7", [0, 1, 2])]


def test_fan_out_gives_one_answer_to_all() -> None:
    trace = build_trace(TASK, Framework("fan-out", 4))
    assert shape(trace) == [("a0", []), ("a1", [0]), ("a2", [0]), ("a7", [0])]


@pytest.mark.parametrize("framework", ALL, ids=str)
def test_agents_share_one_growing_run(framework: Framework) -> None:
    """What a call reads is what every earlier reader of the same answers read, and more behind it."""
    trace = build_trace(TASK, framework)
    runs: list[tuple[Part, ...]] = []
    for call in trace.calls:
        user = call.messages[1]
        assert (call.messages[0].role, user.role) == ("system", "user")
        assert user.parts[0] == TASK.context
        runs.append(user.parts[:-1])
        assert isinstance(user.parts[-1], str)
    for one in runs:
        for two in runs:
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
            assert common == min(len(one), len(two))


@pytest.mark.parametrize("framework", ALL, ids=str)
def test_the_last_call_asks_and_no_call_reads_the_future(framework: Framework) -> None:
    trace = build_trace(TASK, framework)
    assert len(trace.calls) == framework.agents * framework.rounds
    assert len({call.agent for call in trace.calls}) == framework.agents
    for i, call in enumerate(trace.calls):
        assert all(source < i for source in read(call))
    final = trace.calls[-1]
    assert final.messages[-1].parts[-1] == "\n\nWhat is it?"
    assert (final.agent, final.max_tokens) == ("a7", TASK.answer_tokens)
    assert all(call.max_tokens == TASK.note_tokens for call in trace.calls[:-1])
    assert (trace.id, trace.workload, trace.use) == ("t", "w", "dev")
    assert trace.judge is not None
    assert trace.judge("x") == 1.0


def test_worked_examples_are_turns_behind_the_shared_run() -> None:
    task = Task("t", "w", "dev", "Context.", TEAM, "Third?", examples=(("First?", "1"), ("Second?", "2")))
    first, second = build_trace(task, Framework("sequential", 2)).calls
    assert [m.role for m in first.messages] == ["system", "user"]
    assert [(m.role, m.parts[-1]) for m in second.messages[1:]] == [
        ("user", "\n\nFirst?"),
        ("assistant", "1"),
        ("user", "Second?"),
        ("assistant", "2"),
        ("user", "Third?"),
    ]
    assert second.messages[1].parts[:-1] == ("Context.", "\n\n## a0\n", 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("ring", 4, 1), "framework 'ring' is unknown; there are sequential, loop, fan-in, fan-out"),
        (("sequential", 1, 1), "1 agents: 2 to 8"),
        (("sequential", 9, 1), "9 agents: 2 to 8"),
        (("loop", 4, 0), "0 rounds: 1 to 4"),
        (("loop", 4, 5), "5 rounds: 1 to 4"),
        (("fan-in", 4, 2), "'fan-in' goes through its agents once: 2 rounds need 'loop'"),
    ],
)
def test_impossible_settings_are_named(settings: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Framework(*settings)


def test_a_team_that_is_too_small_is_named() -> None:
    task = Task("t", "w", "dev", "Context.", TEAM[:3], "What?")
    with pytest.raises(ConfigError, match="task t: its team has 3 agents, the framework 4"):
        build_trace(task, Framework("sequential", 4))
