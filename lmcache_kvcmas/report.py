"""What one hop saved, in counted tokens; goes back to the client with its response."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lmcache_kvcmas.spans import Edge, Plan, SpanKind


class JudgedSpan(Protocol):
    """What the gate said about a predicted span."""

    @property
    def edge(self) -> Edge: ...
    @property
    def ehat(self) -> float: ...
    @property
    def accepted(self) -> bool: ...
    @property
    def reason(self) -> str: ...


PLANNED = "planned"
"""Decision of a response that left before the gate had spoken: it was whole in the step of its load."""


@dataclass(frozen=True, slots=True)
class HopReport:
    """Tokens of one prompt, by where their cache came from. ``exact``, ``reused``, ``recomputed`` and ``dense`` add up
    to the prompt."""

    agent: str | None
    edges: tuple[Edge, ...]
    shared_tokens: int
    """Tokens that stand in another agent's record as well."""
    reused_tokens: int
    """Of those: taken over, corrected."""
    recomputed_tokens: int
    """Of those: computed by the model in place, as heads of runs, short parts, the tokens that prediction was least
    sure of, or because the gate refused them."""
    exact_tokens: int
    """The agent's own prefix, from the store."""
    dense_tokens: int
    """All others: prefilled by the engine, or found in its own prefix cache."""
    decision: str
    """``accepted``, ``learning`` (too few anchors), ``none`` (nothing shared), or why the gate or the store said no;
    ``partly: …`` when it said no to some of the tokens; `PLANNED` when the counts are what was planned."""
    ehat: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"edges": [list(e) for e in self.edges]}


def hop_report(
    planned: Plan, used: Plan, judged: Sequence[JudgedSpan], prompt_tokens: int, cause: str | None, chosen: int = 0
) -> HopReport:
    """The report of a request that was planned in one way and served in another (or the same); ``cause`` says why.

    ``chosen`` tokens of the predicted spans in ``used`` were recomputed.
    """
    shared = [(lesson.start, lesson.end) for lesson in planned.lessons]

    def count(*kinds: SpanKind) -> int:
        return sum(s.end - s.start for s in used.spans if s.kind in kinds)

    computed = [s for s in used.spans if s.kind is SpanKind.COMPUTE]
    recomputed = chosen + sum(max(0, min(s.end, b) - max(s.start, a)) for s in computed for a, b in shared)
    exact, reused = count(SpanKind.EXACT), count(SpanKind.PREDICTED, SpanKind.OWN) - chosen
    cause = next((j.reason for j in judged if not j.accepted), cause)
    if used.first_approximate is not None:
        decision = "accepted" if cause is None else f"partly: {cause}"
    elif planned.first_approximate is not None:
        decision = cause or "not_loaded"
    else:
        decision = "learning" if planned.lessons else "none"
    return HopReport(
        agent=planned.agent,
        edges=tuple(dict.fromkeys(lesson.edge for lesson in planned.lessons)),
        shared_tokens=sum(b - a for a, b in shared),
        reused_tokens=reused,
        recomputed_tokens=recomputed,
        exact_tokens=exact,
        dense_tokens=prompt_tokens - exact - reused - recomputed,
        decision=decision,
        ehat=max((j.ehat for j in judged), default=None),
    )
