"""What runs offer to one prompt: the edge that each part of a run would be used on, and whether that edge is ready."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmcache_kvcmas.agents import AgentRegistry, Role, alike
from lmcache_kvcmas.candidates import Run
from lmcache_kvcmas.fingerprint import Tokens
from lmcache_kvcmas.labels import Labels
from lmcache_kvcmas.records import Part
from lmcache_kvcmas.spans import Edge, Lesson

ELSEWHERE = "/other"
"""Suffix of an agent's name as the source of an edge to itself: it read these tokens behind something else. Not made
of the characters of names, so no agent can be called so."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A part of a run as something to take over, or to learn from."""

    lesson: Lesson
    own: bool
    """The asking agent itself left it, behind the same tokens but for a date or a name."""
    ready: bool
    """Needs no correction, or its edge has learned enough to give one."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """When an edge may be used: from ``min_anchors`` anchors on, of which ``anchors_of`` gives the number it has.

    ``anchors_of`` is None for a predictor that learns nothing: it is always ready.
    """

    anchors_of: Callable[[Edge], int] | None
    min_anchors: int

    def progress(self, edge: Edge) -> int:
        """Anchors that the edge has, no more than it needs."""
        return self.min_anchors if self.anchors_of is None else min(self.anchors_of(edge), self.min_anchors)


class Offers:
    """The runs of one prompt, taken from left to right; owns the prompt's labels."""

    def __init__(
        self,
        tokens: Tokens,
        agent: str,
        registry: AgentRegistry,
        prefixes: Mapping[bytes, int],
        readiness: Readiness,
        head: int,
    ) -> None:
        self.labels = Labels()
        self._tokens = tokens
        self._agent = agent
        self._registry = registry
        self._prefixes = prefixes
        self._readiness = readiness
        self._head = head

    def rank(self, run: Run) -> tuple[bool, int]:
        """Among runs that cover as much, the larger is the better one: own, then the edge that has learned more."""
        own, source = self._source(run)
        if own:
            return True, self._readiness.min_anchors
        labels = self.labels.copy()
        edges = [Edge(source, self._agent, labels.add(run.match, part, 0.0)) for part in run.parts]
        return False, min(self._readiness.progress(e) for e in edges)

    def take(self, run: Run) -> list[Offer]:
        """The run's parts, in order. Labels the prompt with them."""
        own, source = self._source(run)
        match, moved = run.match, run.moved
        role = self._role(run)
        offers = []
        for part in run.parts:
            edge = Edge(source, self._agent, self.labels.add(match, part, part.error2))
            start, end = part.start + moved, part.end + moved
            head = max(0, min(match.start + self._head, end) - start)
            pieces = match.record.clipped(part.start, part.end, moved)
            lesson = Lesson(start, end, edge, pieces, _offset(part, role), head, part.error2)
            ready = own or self._readiness.progress(edge) >= self._readiness.min_anchors
            offers.append(Offer(lesson, own, ready))
        return offers

    def _role(self, run: Run) -> Role:
        match = run.match
        if match.is_prefix:
            return self._registry.role_of(match.record) or Role(self._agent, None)
        return self._registry.resolve(match.record, self._prefixes[match.record.id])

    def _source(self, run: Run) -> tuple[bool, str]:
        """Whether the run is the asking agent's own, and the name of its source on edges."""
        if run.match.is_prefix:
            return True, self._agent
        name = self._role(run).agent
        if name != self._agent:
            return False, name
        # A name alone is not trusted (a client may have given it): what stands in front has to be the same as well.
        front = run.match.record.tokens[: run.start - run.moved]
        own = alike(front, self._tokens[: run.start])
        return own, name if own else name + ELSEWHERE


def _offset(part: Part, role: Role) -> int:
    """Tokens between the start of the part's slot and the part; the role prompt in front of the context not counted."""
    begin = part.slot_start
    if role.prefix is not None and begin < role.prefix <= part.start:
        begin = role.prefix
    return part.start - begin
