"""Workflows as chat requests: what agents ask a server, one call after another, and how the last answer is judged."""

from collections.abc import Callable
from dataclasses import dataclass

Part = str | int
"""A piece of a message: text, or the answer of an earlier call of the same trace, by its index."""


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    """``system``, ``user`` or ``assistant``."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One chat request, and what is said to it."""

    agent: str | None
    """Who asks; None where nobody knows: the planner then tells agents apart by what stands in front of the run."""
    messages: tuple[Message, ...]
    max_tokens: int = 32
    answer: str | None = None
    """The recorded answer. None: the model's own, computed densely, of at most ``max_tokens`` tokens."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One workflow from its first call to its last."""

    id: str
    workload: str
    """What it belongs to: results are reported by it."""
    use: str
    """``learn`` fills the pools, ``dev`` is for choosing, ``test`` for reporting."""
    calls: tuple[Call, ...]
    judge: Callable[[str], float] | None = None
    """Scores the last call's answer, 0 to 1. None where there is no right answer."""
