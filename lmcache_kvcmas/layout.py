"""What a finished request leaves behind: which of its cache is written, in what form, and what is only pointed at.

Full width is kept of what nobody else has; of a run that a source has too, a low-rank difference to the source's
full-width chunks. Differences are relative to full-width chunks, never to one another, so reading takes one of each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import msgspec
from blake3 import blake3

from lmcache_kvcmas.codecs import RAW
from lmcache_kvcmas.fingerprint import Tokens
from lmcache_kvcmas.keys import GROUP
from lmcache_kvcmas.plans import LabelledPlan
from lmcache_kvcmas.records import GENERATED, Segment
from lmcache_kvcmas.spans import Piece, SpanKind

_TOGETHER = 16
"""Chunks of one group: as many as are worth one round trip to one node of a cluster."""


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """Store positions ``[start, end)`` at full width."""

    key: bytes
    start: int
    end: int
    codec: str = RAW


@dataclass(frozen=True, slots=True)
class DeltaWrite:
    """Store ``[start, end)`` as a rank-r difference to the rows of ``bases``."""

    key: bytes
    start: int
    end: int
    lesson: int
    """Index of the plan's lesson that ``[start, end)`` is a part of."""
    bases: tuple[Piece, ...]
    """Rows of full-width chunks, in this request's positions, covering the stretch exactly; none has a delta."""


Write = ChunkWrite | DeltaWrite


@dataclass(frozen=True, slots=True)
class CaptureLayout:
    """The pieces and segments of the new record, and the writes that make the pieces true."""

    pieces: tuple[Piece, ...]
    """Cover all of the record's tokens, without a hole."""
    writes: tuple[Write, ...]
    segments: tuple[Segment, ...]


def lay_out(
    plan: LabelledPlan,
    tokens: Tokens,
    *,
    prompt_tokens: int,
    accepted: bool,
    tag: bytes = b"",
    ehat2: Mapping[int, float] | None = None,
    chunk_tokens: int = 256,
    min_run: int = 64,
    codec: str = RAW,
    base_key: Callable[[bytes, bytes], bytes],
    delta_key: Callable[[bytes, bytes], bytes],
) -> CaptureLayout:
    """Lay out the cache of one request.

    Args:
        plan: As it was carried out (`plans.shorten`, `plans.without_approximation` if less of it was).
        tokens: ``[T]`` int32, all tokens whose cache exists: of the prompt, and generated.
        accepted: Whether the plan's approximate spans were really used; otherwise everything was computed densely.
        tag: `plans.plan_tag` of the plan. Approximate content is keyed by it.
        ehat2: Index of a lesson → ê² that this hop added to it.
        chunk_tokens: Most tokens of one full-width chunk.
        min_run: A stretch of at most this many tokens is not worth a difference.
        codec: How full-width chunks are stored. Part of their content; with a lossy one no piece of them is exact.
        base_key: Content and group → key of a full-width chunk.
        delta_key: Content and group → key of a difference.

    Raises:
        ValueError: approximate spans were used, but there is no tag to keep their content apart from exact content.
    """
    computed = len(tokens)
    first = plan.first_approximate if accepted else None
    if first is not None and not tag:
        raise ValueError("a plan whose approximate spans were used needs its tag")
    writer = _Writer(tokens, computed if first is None else first, tag, chunk_tokens, codec, base_key, delta_key)
    for begin, end, lesson, pieces in _stretches(plan, accepted):
        a, b = max(begin, writer.at), min(end, computed)
        if a >= b or (lesson is not None and b - a <= min_run):
            continue
        writer.full(a)
        inside = tuple(p.clip(a, b) for p in pieces if p.start < b and p.end > a)
        if lesson is None:
            writer.reuse(b, inside)
        else:
            writer.difference(b, lesson, inside)
    writer.full(computed)
    prompt = _relabelled(plan.segments, _errors(plan, accepted, ehat2 or {}), min(prompt_tokens, computed))
    generated = (Segment(prompt_tokens, computed, GENERATED),) if computed > prompt_tokens else ()
    return CaptureLayout(tuple(writer.pieces), tuple(writer.writes), (*prompt, *generated))


class _Stretch(NamedTuple):
    start: int
    end: int
    lesson: int | None
    """None for what the store already holds as it is."""
    pieces: tuple[Piece, ...]


def _stretches(plan: LabelledPlan, accepted: bool) -> list[_Stretch]:
    """What need not be kept at full width, in order. Later ones give way where they overlap earlier ones."""
    # An own span is its source's cache, moved: what the store holds of it says all.
    kinds = (SpanKind.EXACT, SpanKind.OWN) if accepted else (SpanKind.EXACT,)
    found = [
        _Stretch(s.start, s.end, None, s.pieces if s.kind is SpanKind.EXACT else _inexact(s.pieces))
        for s in plan.spans
        if s.kind in kinds
    ]
    found += [
        _Stretch(lesson.start + lesson.head, lesson.end, i, lesson.pieces) for i, lesson in enumerate(plan.lessons)
    ]
    return sorted(found, key=lambda s: (s.start, s.lesson is not None))


def _inexact(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    return tuple(replace(p, exact=False) for p in pieces)


class _Writer:
    """Fills the layout from left to right; ``at`` is where it stands."""

    def __init__(
        self,
        tokens: Tokens,
        exact_until: int,
        tag: bytes,
        chunk_tokens: int,
        codec: str,
        base_key: Callable[[bytes, bytes], bytes],
        delta_key: Callable[[bytes, bytes], bytes],
    ) -> None:
        self.at = 0
        self.pieces: list[Piece] = []
        self.writes: list[Write] = []
        self._bytes = memoryview(tokens.astype("<i4").tobytes())
        self._hashed = 0
        self._hasher = blake3()
        self._exact_until = exact_until
        self._tag = tag
        self._chunk_tokens, self._codec = chunk_tokens, codec
        self._base_key = base_key
        self._delta_key = delta_key
        self._groups: dict[int, bytes] = {}

    def full(self, end: int) -> None:
        """Full-width chunks up to ``end``; none is exact in one half and approximate in the other."""
        while self.at < end:
            stop = min(end, self.at + self._chunk_tokens)
            exact = self.at < self._exact_until
            if exact:
                stop = min(stop, self._exact_until)
            kind = "base" if self._codec == RAW else f"base {self._codec}"
            key = self._base_key(self._content(kind, stop, None), self._group(stop))
            self.writes.append(ChunkWrite(key, self.at, stop, self._codec))
            self.pieces.append(Piece(self.at, stop, key, 0, exact=exact and self._codec == RAW))
            self.at = stop

    def reuse(self, end: int, pieces: tuple[Piece, ...]) -> None:
        """Point at what the store holds."""
        self.pieces += pieces
        self.at = end

    def difference(self, end: int, lesson: int, pieces: tuple[Piece, ...]) -> None:
        """A difference to the full-width rows of ``pieces``, whatever differences they have themselves."""
        bases = tuple(replace(p, delta=None, delta_row=0) for p in pieces)
        key = self._delta_key(self._content("delta", end, bases), bases[0].chunk[GROUP])
        self.writes.append(DeltaWrite(key, self.at, end, lesson, bases))
        self.pieces += [Piece(p.start, p.end, p.chunk, p.row, key, p.start - self.at, exact=False) for p in bases]
        self.at = end

    def _group(self, end: int) -> bytes:
        """Names what the chunk that ends at ``end`` is read together with, by tokens in front of it or in it.

        The rest of the first `_TOGETHER` chunks goes by the first two: those hold an agent's role prompt and too little
        of its context for prompts of one agent to be all of one group.
        """
        window = _TOGETHER * self._chunk_tokens
        start = (end - 1) // window * window
        stop = start or min(end, 2 * self._chunk_tokens)
        if stop not in self._groups:
            self._groups[stop] = blake3(self._bytes[: 4 * stop]).digest(length=4)
        return self._groups[stop]

    def _content(self, kind: str, end: int, bases: tuple[Piece, ...] | None) -> bytes:
        """Names the cache of ``[at, end)``: all tokens up to its end, and how it came about where that is not dense."""
        self._hasher.update(self._bytes[4 * self._hashed : 4 * end])
        self._hashed = end
        tag = self._tag if end > self._exact_until else b""
        rows = None if bases is None else [[p.start, p.end, p.chunk, p.row] for p in bases]
        return blake3(msgspec.msgpack.encode([kind, tag, self._hasher.digest(), self.at, end, rows])).digest()


def _errors(plan: LabelledPlan, accepted: bool, ehat2: Mapping[int, float]) -> list[tuple[int, int, float]]:
    """Stretches whose cache is approximate, with Σ ê² along the chain, this hop included."""
    found = []
    for s in plan.spans if accepted else ():
        if s.kind is SpanKind.OWN:
            found.append((s.start, s.end, s.error2))
        elif s.kind is SpanKind.PREDICTED:
            at = next((i for i, lesson in enumerate(plan.lessons) if lesson.start <= s.start < lesson.end), None)
            found.append((s.start, s.end, s.error2 + (0.0 if at is None else ehat2.get(at, 0.0))))
    return found


def _relabelled(segments: tuple[Segment, ...], errors: list[tuple[int, int, float]], end: int) -> tuple[Segment, ...]:
    """The plan's labels with this hop's errors, cut at ``end``; all of it context where the plan has no labels."""
    cuts = sorted({0, end, *(x for s in segments for x in s[:2]), *(x for e in errors for x in e[:2])})
    result: list[Segment] = []
    for a, b in pairwise(cuts):
        if b > end:
            break
        slot = next((s.slot for s in segments if s.start <= a < s.end), result[-1].slot if result else 0)
        error2 = next((e for x, y, e in errors if x <= a < y), 0.0)
        if result and (result[-1].slot, result[-1].error2) == (slot, error2):
            result[-1] = result[-1]._replace(end=b)
        else:
            result.append(Segment(a, b, slot, error2))
    return tuple(result)
