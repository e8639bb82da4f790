"""Task sets: problems for a team of agents, and the right answers where there are any.

One file a set, each with a maker that gives the same tasks for the same seed. A problem belongs to one use only
(``splits``), whatever the seed and the counts, so nothing that was learnt or chosen on is reported on.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ...errors import ConfigError
from ..frameworks import Framework, Task, build_trace
from ..traces import Trace
from .bfcl import bfcl
from .contexts import contexts
from .humaneval import humaneval
from .long import LARGEST, SMALLEST, long
from .multihop import multihop, singlehop
from .reasoning import reasoning
from .splits import USES, Counts

Maker = Callable[[str, Counts, int], Sequence[Task]]
"""From the name that a set goes by, the tasks of each use, and a seed."""

TASKS: Mapping[str, Maker] = MappingProxyType(
    {
        "contexts": contexts,
        "multihop": multihop,
        "singlehop": singlehop,
        "reasoning": reasoning,
        "humaneval": humaneval,
        "bfcl": bfcl,
        "long": long,
    }
)

__all__ = ["TASKS", "USES", "Counts", "Maker", "make_tasks", "make_traces"]


def make_tasks(name: str, counts: Counts, seed: int = 0) -> list[Task]:
    """Tasks of one set, all of ``learn`` first, then ``dev``, then ``test``; ``long`` may carry a size: ``long:6000``.

    Raises ConfigError on an unknown name or size, when the set has fewer problems, or when its package is missing.
    """
    base, colon, size = name.partition(":")
    if base not in TASKS:
        raise ConfigError(f"task set {name!r} is unknown; there are {', '.join(TASKS)}")
    if not colon:
        return list(TASKS[name](name, counts, seed))
    if base != "long" or not (size.isascii() and size.isdigit()):
        raise ConfigError(
            f"task set {name!r}: a size is for 'long' alone, in tokens: long:{SMALLEST} to long:{LARGEST}"
        )
    return list(long(name, counts, seed, int(size)))


def make_traces(names: Sequence[str], counts: Counts, framework: Framework, seed: int = 0) -> list[Trace]:
    """Traces of several sets, each worked on in the same way. Raises ConfigError like ``make_tasks``."""
    if not names:
        raise ConfigError(f"no task set is named; there are {', '.join(TASKS)}")
    return [build_trace(task, framework) for name in dict.fromkeys(names) for task in make_tasks(name, counts, seed)]
