"""The project's own contexts: documents with a question, code to review, sums, and reports to condense. Not judged."""

import random
from collections.abc import Sequence

from ...errors import ConfigError
from ..frameworks import Task
from .splits import USES, Counts
from .teams import read_contexts, read_team


def contexts(name: str, counts: Counts, seed: int) -> Sequence[Task]:
    """14 contexts to learn from, 7 to choose and 8 to report on; which of them, and in which order, is the seed's."""
    tasks = []
    for use in USES:
        own = [c for c in read_contexts() if c.use == use]
        if counts.of(use) > len(own):
            raise ConfigError(f"task set {name!r}: {counts.of(use)} {use} traces are asked for, it has {len(own)}")
        for c in random.Random(f"{seed}/{name}/{use}").sample(own, counts.of(use)):
            tasks.append(_task(name, use, c.id, c.text))
    return tasks


def _task(name: str, use: str, id: str, text: str) -> Task:
    team = read_team("roles")
    return Task(f"{name}-{use}-{id}", name, use, text, team, team[-1].instruction, answer_tokens=32)
