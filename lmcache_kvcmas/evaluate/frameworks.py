"""Ways in which agents work together: the calls that each makes of one task.

All agents of a task read the same text in the same order, at the front of their user message: the task's context, then
the earlier answers under headings, in the order in which they were given. What an agent alone is told stands around it:
its role in front, its instruction behind. So what two agents share is one run of tokens, and it only ever grows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .traces import Call, Message, Part, Trace

FRAMEWORKS = ("sequential", "loop", "fan-in", "fan-out")
MAX_AGENTS = 8
MAX_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    role: str
    """Its system prompt."""
    instruction: str
    """What it is told after everything it reads, where it does not give the final answer."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something for a team to do, whatever the way they work together."""

    id: str
    workload: str
    use: str
    """``learn``, ``dev`` or ``test``."""
    context: str
    """What every agent reads first."""
    team: tuple[Agent, ...]
    """Of a team of ``n``, the first ``n - 1`` and the last one work; the last one gives the final answer."""
    question: str
    """The last call's instruction."""
    examples: tuple[tuple[str, str], ...] = ()
    """Questions and answers that stand between what the last agent reads and its question, as turns of the chat."""
    judge: Callable[[str], float] | None = None
    note_tokens: int = 24
    """Bound of every answer but the last."""
    answer_tokens: int = 8
    """Bound of the last answer."""


@dataclass(frozen=True, slots=True)
class Framework:
    """One way of working together. Raises ConfigError on an unknown name, or a team or number of rounds out of bounds.

    - ``sequential``: each agent reads the context and all earlier answers; the last one reflects on them.
    - ``loop``: the same, and the turn goes round the team ``rounds`` times.
    - ``fan-in``: all but the last read the context alone; the last reads it and all their answers.
    - ``fan-out``: the first reads the context; all others read it and the first's answer. The last of them is judged.
    """

    name: str = "sequential"
    agents: int = 4
    rounds: int = 1
    """Of ``loop``; all others go through their agents once."""

    def __post_init__(self) -> None:
        if self.name not in FRAMEWORKS:
            raise ConfigError(f"framework {self.name!r} is unknown; there are {', '.join(FRAMEWORKS)}")
        if not 2 <= self.agents <= MAX_AGENTS:
            raise ConfigError(f"a framework of {self.agents} agents: 2 to {MAX_AGENTS} are allowed")
        if not 1 <= self.rounds <= MAX_ROUNDS:
            raise ConfigError(f"a framework of {self.rounds} rounds: 1 to {MAX_ROUNDS} are allowed")
        if self.rounds > 1 and self.name != "loop":
            raise ConfigError(f"framework {self.name!r} goes through its agents once: {self.rounds} rounds need 'loop'")

    def sources(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Of each call: who makes it (index into the team of ``agents``), and which earlier calls' answers it reads."""
        last = self.agents - 1
        if self.name == "fan-in":
            return (*((i, ()) for i in range(last)), (last, tuple(range(last))))
        if self.name == "fan-out":
            return ((0, ()), *((i, (0,)) for i in range(1, self.agents)))
        return tuple((i % self.agents, tuple(range(i))) for i in range(self.agents * self.rounds))


def build_trace(task: Task, framework: Framework) -> Trace:
    """The calls of ``task``. Raises ConfigError when its team is smaller than the framework's."""
    if len(task.team) < framework.agents:
        raise ConfigError(f"task {task.id}: its team has {len(task.team)} agents, the framework {framework.agents}")
    team = (*task.team[: framework.agents - 1], task.team[-1])
    plan = framework.sources()
    headings = [_heading(team[who].name, i // framework.agents + 1) for i, (who, _) in enumerate(plan)]
    calls = []
    for i, (who, read) in enumerate(plan):
        shared: list[Part] = [task.context]
        for source in read:
            shared += [headings[source], source]
        final = i == len(plan) - 1
        turns = _final_turns(task, shared) if final else [_user(shared, team[who].instruction)]
        messages = (Message("system", (team[who].role,)), *turns)
        calls.append(Call(team[who].name, messages, task.answer_tokens if final else task.note_tokens))
    return Trace(task.id, task.workload, task.use, tuple(calls), task.judge)


def _heading(name: str, turn: int) -> str:
    return f"\n\n## {name}\n" if turn == 1 else f"\n\n## {name}, round {turn}\n"


def _user(shared: Sequence[Part], instruction: str) -> Message:
    return Message("user", (*shared, f"\n\n{instruction}"))


def _final_turns(task: Task, shared: Sequence[Part]) -> list[Message]:
    """The last agent's user message, and one more for each example: ``shared`` stands in the first only."""
    asked = [question for question, _ in task.examples] + [task.question]
    turns = [_user(shared, asked[0])]
    for (_, answer), question in zip(task.examples, asked[1:], strict=True):
        turns += [Message("assistant", (answer,)), Message("user", (question,))]
    return turns
