"""Numbering the agent outputs of a prompt: which slot does each token belong to?"""

from lmcache_kvcmas.index import Match
from lmcache_kvcmas.records import Part, Segment


class Labels:
    """Labels a prompt from left to right.

    Slot 0 is the user's context. Agent outputs count 1, 2, … in the order in which the prompt shows them, whatever
    their number was in the record: what a record generated has none there, and a prompt may show only some outputs.
    """

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._numbers: dict[tuple[bytes, int, int], int] = {}
        self._outputs = 0

    def copy(self) -> "Labels":
        """Labels that go on from here on their own."""
        other = Labels()
        other._segments = self._segments.copy()
        other._numbers = self._numbers.copy()
        other._outputs = self._outputs
        return other

    def add(self, match: Match, part: Part, error2: float) -> int:
        """Label what ``part`` of the match's record is in the prompt, and return its slot there."""
        moved = match.start - match.source_start
        slot = self._number(match, part, moved)
        self._segments.append(Segment(part.start + moved, part.end + moved, slot, error2))
        return slot

    def _number(self, match: Match, part: Part, moved: int) -> int:
        if part.slot == 0:
            return 0
        key = (match.record.id, part.slot, moved)
        number = self._numbers.get(key)
        if number is None:
            number = self._begun(match, part, moved)
            if number is None:
                self._outputs += 1
                number = self._outputs
            self._numbers[key] = number
        return number

    def _begun(self, match: Match, part: Part, moved: int) -> int | None:
        """The number of an output whose beginning another record has already shown, if that is so here."""
        begin = part.slot_start + moved
        if begin < match.start or begin >= part.start + moved:
            return None
        for s in reversed(self._segments):
            if s.start <= begin < s.end:
                return s.slot or None
        return None

    def segments(self, tokens: int) -> tuple[Segment, ...]:
        """Labels of all ``tokens`` of the prompt; what nothing labelled has the slot to its left."""
        filled: list[Segment] = []
        at, slot = 0, 0
        for s in self._segments:
            if s.start > at:
                _append(filled, Segment(at, s.start, slot))
            _append(filled, s)
            at, slot = s.end, s.slot
        if tokens > at:
            _append(filled, Segment(at, tokens, slot))
        return tuple(filled)


def _append(segments: list[Segment], s: Segment) -> None:
    last = segments[-1] if segments else None
    if last is not None and (last.end, last.slot, last.error2) == (s.start, s.slot, s.error2):
        segments[-1] = last._replace(end=s.end)
    else:
        segments.append(s)
