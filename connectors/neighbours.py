"""Other nodes, as the scheduler knows them: what they left, and which of it has to be brought here first."""

import time
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from lmcache_kvcmas.connectors.journal import Journal
from lmcache_kvcmas.connectors.lmcache_shared import PREFETCH_BATCH
from lmcache_kvcmas.connectors.messages import Prefetch, Prefetched
from lmcache_kvcmas.manifest import Needed, needed, needed_by
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.shared import News
from lmcache_kvcmas.spans import Piece, Plan

_NEWS = 16  # taken in between two looks at the clock; a record of 4K tokens takes about 0.3 ms
_SPARE = 3  # time-outs that a request waits beyond those of its batches: for connecting, and behind another request


@dataclass
class Waiting:
    """A request whose entries are on their way."""

    until: float
    """By `time.monotonic`; the workers should have spoken long before."""
    ranks: int
    """That have not spoken yet."""
    missing: set[bytes] = field(default_factory=set)

    @property
    def too_long(self) -> bool:
        return time.monotonic() >= self.until

    def heard(self, part: Prefetched) -> bool:
        """Take in what ranks say; True once all have spoken."""
        self.ranks -= part.ranks
        self.missing |= part.gone | part.unreachable
        return self.ranks <= 0


class Neighbours:
    """The journal of other nodes, and the keys of entries that only the shared tier may hold.

    Args:
        ranks: Tensor-parallel ranks of this engine.
        timeout: Seconds that a batch of the shared tier may take.
    """

    def __init__(self, journal: Journal, ranks: int, timeout: float) -> None:
        self._journal, self._ranks, self._timeout = journal, ranks, timeout
        self._away: set[bytes] = set()

    def catch_up(self, seconds: float) -> None:
        """Wait for what was left before this engine started."""
        self._journal.caught_up.wait(seconds)

    def news(self, seconds: float) -> Iterator[News]:
        """What other nodes did, oldest first; ends after about ``seconds`` at most."""
        until = time.monotonic() + seconds
        while news := self._journal.take(_NEWS):
            yield from news
            if time.monotonic() > until:
                return

    def left(self, record: Record) -> None:
        """Another node left ``record``."""
        self._away |= {n.key for n in needed(record)}

    def lost(self, keys: Set[bytes]) -> None:
        """This node's tiers hold ``keys`` no more."""
        self._away |= keys

    def held(self, keys: Iterable[bytes]) -> None:
        """This node's tiers hold ``keys`` now, or no tier does."""
        self._away.difference_update(keys)

    def forget_unneeded(self, needs: Set[bytes]) -> None:
        """Keep no more keys in mind than records need."""
        if len(self._away) > 2 * len(needs) + 1024:
            self._away &= needs

    def send_for(self, request: str, plan: Plan) -> tuple[list[Prefetch], Waiting | None]:
        """What to prefetch for a plan, and the request's wait for it, if its spans need any of it.

        Nothing waits for what only lessons need.
        """
        if not self._away:
            return [], None
        spans = [n for n in entries_of(p for s in plan.spans for p in s.pieces) if n.key in self._away]
        lessons = entries_of(p for lesson in plan.lessons for p in lesson.pieces)
        later = [n for n in lessons if n.key in self._away and n not in spans]
        prefetches, waiting = [], None
        if spans:
            prefetches.append(Prefetch(request, tuple(spans)))
            patience = self._timeout * (_SPARE + -(-len(spans) // PREFETCH_BATCH))
            waiting = Waiting(time.monotonic() + patience, self._ranks)
        if later:
            prefetches.append(Prefetch(f"{request}/lessons", tuple(later)))
            self.held(n.key for n in later)  # or every request would send for them again
        return prefetches, waiting

    def close(self) -> None:
        self._journal.close()


def entries_of(pieces: Iterable[Piece]) -> tuple[Needed, ...]:
    """What ``pieces`` need from the store, each once."""
    return tuple(dict.fromkeys(n for piece in pieces for n in needed_by(piece)))


def first_without(plan: Plan, missing: Set[bytes]) -> int:
    """The first position of the cover whose entries are among ``missing``; its end if there is none."""
    return next((p.start for s in plan.spans for p in s.pieces if {p.chunk, p.delta} & missing), plan.covered)
