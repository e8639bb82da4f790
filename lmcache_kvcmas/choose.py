"""Which tokens of a predicted run are worth a forward of their own: those that its anchors disagree about."""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

WINDOW = 16
"""Rows that are chosen together. Every stretch of chosen rows reads the whole cache in front of it once, so single rows
cost an engine as many reads as there are rows; 16 queries of four heads to a KV head fill a tile of 64."""


def choose(doubts: Tensor, count: int, head: int = 0) -> Tensor:
    """``count`` rows of the windows with the largest doubts ``[T]`` (`Reliability.doubts`), int64 and rising.

    Windows are counted from the end, so that a run whose beginning is held already has the same ones; the first may be
    a short one. Of the last window that is taken, the first rows are, as many as are still to be had. The first
    ``head`` rows, which are computed anyway, are in no window. Of equal windows the first are taken, on any device:
    ranks that see the same doubts must choose the same rows.
    """
    count = max(0, min(count, len(doubts) - head))
    short = -(len(doubts) - head) % WINDOW
    sums = pad(doubts[head:], (short, 0)).view(-1, WINDOW).sum(1)
    windows = sums.sort(descending=True, stable=True).indices[: count // WINDOW + 2, None]
    rows = (windows * WINDOW + torch.arange(WINDOW, device=doubts.device)).flatten() - short
    chosen: Tensor = rows[rows >= 0][:count].sort().values + head
    return chosen


def except_rows(tokens: int, rows: Tensor | None, device: torch.device | str = "cpu") -> Tensor:
    """bool ``[T]``: all rows but ``rows``."""
    left = torch.ones(tokens, dtype=torch.bool, device=device)
    if rows is not None:
        left[rows.to(device)] = False
    return left


def stretches(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rising ``rows`` as half-open stretches; rows that touch are one."""
    start = end = -1
    for row in rows:
        if row != end:
            if end > start:
                yield start, end
            start = row
        end = row + 1
    if end > start:
        yield start, end


class _Span(NamedTuple):
    start: int
    positions: Sequence[int]

    @property
    def size(self) -> int:
        return 64 + len(self.positions)


class ChosenBefore:
    """What was chosen of recent spans, ``most`` positions in all (a span itself counts as some).

    An engine may have the beginning of a span from an earlier request. Chosen among the rest alone, other tokens would
    be computed than that one computed, and the same prompt would get another answer.
    """

    def __init__(self, most: int = 1 << 20) -> None:
        self._most, self._held = most, 0
        self._spans: OrderedDict[tuple[bytes, int], _Span] = OrderedDict()

    def keep(self, tag: bytes, start: int, end: int, rows: Sequence[int]) -> None:
        """Remember the ``rows`` of the span ``[start, end)`` of a plan with this tag, unless more of it is known."""
        known = self._spans.get((tag, end))
        if not rows or (known is not None and known.start <= start):
            return
        new = _Span(start, array("i", (start + row for row in rows)))
        self._held += new.size - (known.size if known is not None else 0)
        self._spans[tag, end] = new
        self._spans.move_to_end((tag, end))
        while self._held > self._most:
            self._held -= self._spans.popitem(last=False)[1].size

    def find(self, tag: bytes, start: int, end: int) -> list[int] | None:
        """Rows of ``[start, end)`` that were chosen of it, or of a longer span that ends with it; None if unknown."""
        known = self._spans.get((tag, end))
        if known is None or known.start > start:
            return None
        self._spans.move_to_end((tag, end))
        return [position - start for position in known.positions if position >= start]
