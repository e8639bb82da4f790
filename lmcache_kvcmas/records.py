"""Records: what one request left behind, and which agent output each of its tokens belongs to."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from lmcache_kvcmas.fingerprint import Tokens
from lmcache_kvcmas.spans import Piece

GENERATED = -1
"""The slot of tokens that the record's own request generated: an agent output that no prompt has numbered yet."""


def record_content(tokens: Tokens, agent: str | None) -> bytes:
    """Names a record by its tokens and by who left it; see ``keys.KeySpace.record``."""
    return blake3(tokens.astype("<i4").tobytes()).digest() + (agent or "").encode()


class Segment(NamedTuple):
    """Tokens ``[start, end)`` that belong together: the user's context, or one agent's output."""

    start: int
    end: int
    slot: int
    """0 for the user's context, j for the j-th agent output in it, `GENERATED` for this record's own."""
    error2: float = 0.0
    """Σ ê² along the hops that the cache of these tokens went through."""


class Part(NamedTuple):
    """A maximal stretch of one slot inside a part of a record, in record positions."""

    start: int
    end: int
    slot: int
    slot_start: int
    """Where the slot begins in the record; at most ``start``."""
    error2: float
    """The largest of its segments'."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What one request left behind. ``pieces`` may have holes; ``segments`` label every token.

    Raises:
        ValueError: the parts contradict one another (a reader of foreign records treats it as a miss).
    """

    id: bytes
    tokens: Tokens
    """``[T]`` int32: prompt, then generated tokens."""
    prompt_tokens: int
    pieces: tuple[Piece, ...]
    segments: tuple[Segment, ...] = ()
    """Empty for: the prompt is context, the rest was generated."""
    agent: str | None = None
    """The agent that left it, as its plan named it (from a hint, or identified); None when nobody knew yet."""
    workflow: str | None = None
    salt: str = ""
    sequence: int = 0
    """Larger is more recent."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if self.tokens.ndim != 1 or self.tokens.dtype != np.int32:
            raise ValueError(f"record tokens must be 1-D int32, got {self.tokens.ndim}-D {self.tokens.dtype}")
        if not 0 <= self.prompt_tokens <= n:
            raise ValueError(f"record has {n} tokens, so prompt_tokens cannot be {self.prompt_tokens}")
        _check_order("piece", [(p.start, p.end) for p in self.pieces], n)
        if not self.segments:
            object.__setattr__(self, "segments", default_segments(self.prompt_tokens, n))
        _check_order("segment", [(s.start, s.end) for s in self.segments], n)
        if sum(s.end - s.start for s in self.segments) != n:
            raise ValueError(f"record segments must label each of its {n} tokens")

    def parts(self, start: int, end: int) -> list[Part]:
        """``[start, end)`` cut where the slot changes."""
        parts: list[Part] = []
        slot_start = 0
        previous: int | None = None
        for s in self.segments:
            if s.slot != previous:
                slot_start, previous = s.start, s.slot
            a, b = max(s.start, start), min(s.end, end)
            if a >= b:
                continue
            last = parts[-1] if parts else None
            if last is not None and last.slot == s.slot and last.slot_start == slot_start:
                parts[-1] = last._replace(end=b, error2=max(last.error2, s.error2))
            else:
                parts.append(Part(a, b, s.slot, slot_start, s.error2))
        return parts

    def stretches(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of ``[start, end)`` that pieces cover without a hole, in order."""
        found: list[tuple[int, int]] = []
        for p in self.pieces:
            a, b = max(p.start, start), min(p.end, end)
            if a >= b:
                continue
            if found and found[-1][1] == a:
                found[-1] = (found[-1][0], b)
            else:
                found.append((a, b))
        return found

    def clipped(self, start: int, end: int, moved: int) -> tuple[Piece, ...]:
        """The pieces of ``[start, end)``, moved right by ``moved``."""
        return tuple(p.clip(start, end).moved(moved) for p in self.pieces if p.start < end and p.end > start)


def default_segments(prompt_tokens: int, tokens: int) -> tuple[Segment, ...]:
    """The prompt as context, the rest as generated."""
    both = (Segment(0, prompt_tokens, 0), Segment(prompt_tokens, tokens, GENERATED))
    return tuple(s for s in both if s.end > s.start)


def _check_order(what: str, bounds: list[tuple[int, int]], limit: int) -> None:
    at = 0
    for start, end in bounds:
        if not at <= start < end <= limit:
            raise ValueError(f"record {what} [{start}, {end}) must be ascending, not empty and inside [0, {limit})")
        at = end
