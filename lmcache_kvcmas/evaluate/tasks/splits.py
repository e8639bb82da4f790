"""Which problems are for learning, which for choosing and which for reporting."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar

from ...errors import ConfigError

USES = ("learn", "dev", "test")
_PATIENCE = 10_000

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Counts:
    """Traces of each use, of each task set. Raises ConfigError on a negative number."""

    learn: int = 6
    dev: int = 4
    test: int = 8

    def __post_init__(self) -> None:
        for use in USES:
            if self.of(use) < 0:
                raise ConfigError(f"{self.of(use)} {use} traces: at least 0 are needed")

    def of(self, use: str) -> int:
        return {"learn": self.learn, "dev": self.dev, "test": self.test}[use]


def split_of(problem: str) -> str:
    """The one use of a problem, by its text: the same for every seed and count, so that no two splits can share it."""
    return USES[int.from_bytes(sha256(problem.encode()).digest()[:4], "little") % len(USES)]


def take(name: str, problems: Iterable[P], key: Callable[[P], str], use: str, count: int) -> list[P]:
    """The first ``count`` different problems of ``use``. Raises ConfigError when the set ``name`` has fewer."""
    found: dict[str, P] = {}
    for tries, problem in enumerate(problems):
        if len(found) == count or tries >= _PATIENCE + 10 * count:
            break
        if split_of(key(problem)) == use:
            found.setdefault(key(problem), problem)
    if len(found) < count:
        raise ConfigError(f"task set {name!r}: {count} {use} traces are asked for, it has {len(found)}")
    return list(found.values())
