"""From matches to the runs that a plan can use: who may serve, who asks, and which run comes next."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from lmcache_kvcmas.agents import SHORTEST_ROLE, AgentRegistry, clean_name
from lmcache_kvcmas.fingerprint import SHORTEST_PREFIX, Tokens
from lmcache_kvcmas.hints import Hints
from lmcache_kvcmas.index import Match
from lmcache_kvcmas.records import Part

_AS_LONG = 16
"""Tokens by which a run may be shorter and still count as covering as much."""


class Run(NamedTuple):
    """The prompt's ``[start, end)``, whose cache ``match.record`` holds without a hole."""

    match: Match
    start: int
    end: int

    @property
    def moved(self) -> int:
        """Prompt position − record position."""
        return self.match.start - self.match.source_start

    @property
    def parts(self) -> list[Part]:
        """The run cut where the record's slot changes, in record positions."""
        return self.match.record.parts(self.start - self.moved, self.end - self.moved)

    @property
    def error2(self) -> float:
        """Σ ê² of its worst part."""
        return max(p.error2 for p in self.parts)


def runs_of(matches: Iterable[Match], limit: int) -> list[Run]:
    """The stretches of the matches, up to prompt position ``limit``, that the records' pieces cover."""
    runs = []
    for m in matches:
        moved = m.start - m.source_start
        for a, b in m.record.stretches(m.source_start, min(m.end, limit) - moved):
            runs.append(Run(m, a + moved, b + moved))
    return runs


def role_prefixes(matches: Iterable[Match]) -> dict[bytes, int]:
    """For each record with a run, the tokens in front of its first: its role prompt, as far as this prompt tells."""
    prefixes: dict[bytes, int] = {}
    for m in matches:
        if not m.is_prefix:
            prefixes[m.record.id] = min(m.source_start, prefixes.get(m.record.id, m.source_start))
    return prefixes


def allowed(
    matches: Sequence[Match], hints: Hints, registry: AgentRegistry, prefixes: Mapping[bytes, int]
) -> list[Match]:
    """The matches whose records the hints let serve. A hint that fits no record leaves none: slow, but not wrong.

    A common prefix is the asking agent's own, whatever the hints say.
    """
    source = None if hints.source is None else clean_name(hints.source)
    return [
        m
        for m in matches
        if m.is_prefix
        or (
            (hints.workflow is None or m.record.workflow in (None, hints.workflow))
            and (source is None or registry.resolve(m.record, prefixes[m.record.id]).agent == source)
        )
    ]


def destination(
    tokens: Tokens, matches: Sequence[Match], hint: str | None, registry: AgentRegistry, salt: str
) -> str | None:
    """The agent that asks with this prompt; None when nothing tells where its role prompt ends.

    In order: the hint; the agent of a record that begins with the same role prompt; the tokens in front of the first
    shared run; the tokens that other prompts of this agent began with.
    """
    fronts = role_prefixes(matches)
    # Sources first: the asking agent may be one of them, and asked again must get the same answer.
    roles = {m.record.id: registry.resolve(m.record, fronts[m.record.id]) for m in matches if not m.is_prefix}
    prefixes = sorted((m for m in matches if m.is_prefix), key=lambda m: -m.end)
    if hint is None:
        for m in prefixes:
            role = registry.role_of(m.record)
            if role is not None and role.prefix is not None and SHORTEST_ROLE <= role.prefix <= m.end:
                return role.agent
    begins = []
    for m in matches:
        if not m.is_prefix:
            # A run that begins inside the source's role prompt is role text; its context begins where that ends.
            begin = m.start + max(0, (roles[m.record.id].prefix or 0) - m.source_start)
            if begin < m.end:
                begins.append(begin)
    if begins:
        return registry.identify(tokens, min(begins), hint, salt)
    for m in prefixes:
        if SHORTEST_PREFIX <= m.end < min(len(tokens), len(m.record.tokens)):
            return registry.identify(tokens, m.end, hint, salt)
    return None if hint is None else clean_name(hint)


def next_run(
    runs: Iterable[Run], position: int, longer_than: int, tolerance: int, rank: Callable[[Run], tuple[bool, int]]
) -> Run | None:
    """The run to use from ``position`` on, clipped to begin there or later; None if none has more than ``longer_than``.

    The earliest first (``tolerance`` tokens later is as early), then the longest, then the one of highest ``rank``,
    then the one with the least error along its chain, then the most recent.
    """
    ahead = [r._replace(start=max(r.start, position)) for r in runs if r.end - max(r.start, position) > longer_than]
    if not ahead:
        return None
    latest = min(r.start for r in ahead) + tolerance
    ahead = [r for r in ahead if r.start <= latest]
    enough = max(r.end - r.start for r in ahead) - _AS_LONG
    ahead = [r for r in ahead if r.end - r.start >= enough]
    if len(ahead) == 1:
        return ahead[0]
    return max(ahead, key=lambda r: (rank(r), -r.error2, r.match.record.sequence, r.end - r.start))
