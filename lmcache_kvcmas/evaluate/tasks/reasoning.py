"""Procedurally generated sums of ``reasoning-gym`` 0.1.25 (Apache-2.0), judged by its own ``score_answer``.

The agents read a work sheet of one generator: solved sums, and an open one. Four more, answered in full, stand in front
of the question as turns of the chat: a small model needs to see the form it is to keep. Sums below zero are left out.
Full marks count as right and everything else as wrong.

SmolLM2-135M (Q4_1), dense, four agents in sequence: ``chain_sum`` 3 of 5, ``products`` 9 of 15; the commonest answer
alone is right for 8 percent of the first and 19 percent of the second. Asked at once, without the others' notes: 6 or 7
of 8 each.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ..frameworks import Task
from .packages import optional
from .splits import USES, Counts, take
from .teams import read_team

_SOLVED = 18
"""Sums on a work sheet: 150 tokens and more."""
_EXAMPLES = 4
"""Of those, also turns of the chat."""
_SPAN = 20_000
"""Sums that a generator is asked for; each is made when it is looked at."""


class Problem(NamedTuple):
    sum: str
    """Up to its equals sign."""
    entry: dict[str, Any]
    """The generator's own record, for its ``score_answer``."""

    def solved(self) -> str:
        return f"{self.sum} {self.entry['answer']}"


@dataclass(frozen=True, slots=True)
class Generator:
    settings: Mapping[str, int]
    """Sizes that a model of 135 million parameters can deal with."""
    sum: Callable[[str], str]
    """From a question as the generator words it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """1 when the generator gives full marks to the first number behind the first line's last equals sign."""

    dataset: Any
    entry: dict[str, Any]

    def __call__(self, answer: str) -> float:
        line = (answer.strip().splitlines() or [""])[0]
        found = re.search(r"(?<![\w.])-?\d+(?:\.\d+)?", line.rpartition("=")[2])
        return float(found is not None and self.dataset.score_answer(found[0], self.entry) == 1.0)


def _sum(question: str) -> str:
    """``... arithmetic problem: 8 - 3 =``"""
    return question.rpartition(": ")[2].strip()


def _product(question: str) -> str:
    """``... multiplication: 8 * 3. Give only ...``"""
    return question.rpartition(": ")[2].partition(". ")[0].strip() + " ="


GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {
        "chain_sum": Generator({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, _sum),
        "products": Generator({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, _product),
    }
)


def reasoning(name: str, counts: Counts, seed: int) -> Sequence[Task]:
    """The generators take turns, so that all have as many problems, or one more."""
    gym = optional("reasoning_gym", name)
    tasks = []
    for use in USES:
        for i, (generator, how) in enumerate(GENERATORS.items()):
            count = len(range(i, counts.of(use), len(GENERATORS)))
            dataset = gym.create_dataset(generator, size=_SPAN, seed=seed, **how.settings)
            problems = (Problem(how.sum(e["question"]), e) for e in dataset if not e["answer"].startswith("-"))
            pool = take(name, problems, lambda p: p.sum, use, count + _SOLVED if count else 0)
            rng = random.Random(f"{seed}/{name}/{use}/{generator}")
            for n, problem in enumerate(pool[:count]):
                shown = rng.sample([p for p in pool if p is not problem], _SOLVED)
                tasks.append(_task(f"{name}-{use}-{generator}-{n:02d}", name, use, problem, shown, dataset))
    return tasks


def _task(id: str, name: str, use: str, problem: Problem, shown: Sequence[Problem], dataset: Any) -> Task:
    sheet = "\n".join(p.solved() for p in shown)
    return Task(
        id=id,
        workload=name,
        use=use,
        context=f"Work sheet:\n{sheet}\n\nStill open:\n{problem.sum}",
        team=read_team("team"),
        question=problem.sum,
        examples=tuple((p.sum, p.solved()) for p in shown[:_EXAMPLES]),
        judge=Scored(dataset, problem.entry),
        answer_tokens=12,
    )
