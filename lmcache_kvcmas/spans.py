"""The data that flows from match to learn: pieces of records, spans of a prompt, plans.

All positions are token positions, all stretches half-open. Nothing here knows tensors or engines.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Edge(NamedTuple):
    """A use of one agent's cache by another. The model revision is part of every key, so it is not repeated here."""

    source: str
    destination: str
    slot: int
    """0 for the user's context, j for the j-th agent output in it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Where the cache of the tokens ``[start, end)`` lies: rows of a base chunk, plus rows of a delta if there is one.

    ``start`` and ``end`` count in whatever the piece is part of: a record's tokens, or a prompt's.
    """

    start: int
    end: int
    chunk: bytes
    row: int
    """Row of the chunk that holds ``start``."""
    delta: bytes | None = None
    delta_row: int = 0
    exact: bool = True
    """What the model itself computed over exact tokens in front, kept at full width."""

    def clip(self, start: int, end: int) -> "Piece":
        """The part of this piece inside ``[start, end)``, which must overlap it."""
        a, b = max(self.start, start), min(self.end, end)
        shift = a - self.start
        return Piece(a, b, self.chunk, self.row + shift, self.delta, self.delta_row + shift, self.exact)

    def moved(self, by: int) -> "Piece":
        """The same rows, seen from a sequence in which they stand ``by`` tokens further right."""
        return Piece(self.start + by, self.end + by, self.chunk, self.row, self.delta, self.delta_row, self.exact)


class SpanKind(Enum):
    EXACT = "exact"
    """Same tokens in front, computed by the model, full width: bit for bit what the model would compute."""
    OWN = "own"
    """This agent's own cache of these tokens, but compressed, or computed over corrected tokens."""
    PREDICTED = "predicted"
    """Another agent's cache, to be corrected by what the edge has learned."""
    COMPUTE = "compute"
    """Computed by the model over what stands in front: heads of runs, gaps, prefixes that nobody holds."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch ``[start, end)`` of a prompt and how its cache comes about."""

    kind: SpanKind
    start: int
    end: int
    pieces: tuple[Piece, ...] = ()
    """In prompt positions, in order, covering the span exactly. Empty for COMPUTE."""
    edge: Edge | None = None
    """Set for PREDICTED."""
    offset: int = 0
    """Tokens between the start of the source's segment (its slot) and ``start``: the ``t`` of the predictors."""
    error2: float = 0.0
    """Σ ê² along the chain of hops that the source's cache already went through."""

    def clip(self, start: int, end: int) -> "Span":
        """The part of this span inside ``[start, end)``, which must overlap it."""
        a, b = max(self.start, start), min(self.end, end)
        pieces = tuple(p.clip(a, b) for p in self.pieces if p.start < b and p.end > a)
        return Span(self.kind, a, b, pieces, self.edge, self.offset + a - self.start, self.error2)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A stretch of a prompt that a source has a cache for: what can be learned, and what compresses its capture."""

    start: int
    end: int
    edge: Edge
    pieces: tuple[Piece, ...]
    """The source's cache, in prompt positions."""
    offset: int
    head: int
    """Leading tokens of the stretch that are the head of its run (0 when the run began earlier)."""
    error2: float


@dataclass(frozen=True, slots=True)
class Plan:
    """How a prompt's cache comes about, from position 0 on. What no span covers is prefilled by the engine."""

    spans: tuple[Span, ...] = ()
    lessons: tuple[Lesson, ...] = ()
    agent: str | None = None

    @property
    def covered(self) -> int:
        """Positions ``[0, covered)`` have a span each, without holes."""
        return self.spans[-1].end if self.spans else 0

    @property
    def first_approximate(self) -> int | None:
        """The first position whose cache is not what a dense prefill would give, or None if all of it is."""
        return next((s.start for s in self.spans if s.kind in (SpanKind.OWN, SpanKind.PREDICTED)), None)
