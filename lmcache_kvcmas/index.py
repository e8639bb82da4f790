"""The index of records: which records hold runs of this prompt?

Winnowed fingerprints propose alignments (record, diagonal); every proposal is then settled by comparing tokens along
the diagonal, so a hash collision costs time and nothing else. Owned by one thread (the scheduler's).
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from lmcache_kvcmas.fingerprint import (
    GUARANTEE,
    SHORTEST_PREFIX,
    Hashes,
    Positions,
    Tokens,
    fingerprint,
    prefix_fingerprints,
)
from lmcache_kvcmas.records import Record

_POSITION_BITS = 24
_POSITION = (1 << _POSITION_BITS) - 1
_RECENT = 8
"""Records kept for one fingerprint: boilerplate stands in thousands of them, and the latest serve as well as any."""
_PLACES = 4
"""Places kept for one fingerprint in one record: periodic text repeats without end."""
_ALIGNMENTS = 128
"""Alignments compared for one prompt, those with most hits first: bounds the time that odd prompts take."""
_PREFIXES = 8
"""Records compared with a prompt for a common prefix, the longest first."""


class Match(NamedTuple):
    """``record.tokens[source_start:][: end − start]`` equals the prompt's ``[start, end)``; maximal on both sides."""

    record: Record
    source_start: int
    start: int
    end: int

    @property
    def is_prefix(self) -> bool:
        """Both begin with it."""
        return self.start == 0 and self.source_start == 0


class RecordIndex:
    """At most ``capacity`` records and ``max_tokens`` tokens; the least recently matched goes first."""

    def __init__(self, capacity: int = 4096, max_tokens: int = 1 << 25) -> None:
        self.capacity = capacity
        self.max_tokens = max_tokens
        self._serials: OrderedDict[bytes, int] = OrderedDict()  # record id → serial, least recently used first
        self._records: dict[int, Record] = {}
        self._keys: dict[int, list[int]] = {}  # serial → its hashes, for taking it out again
        self._postings: dict[int, tuple[int, ...]] = {}  # hash → packed (serial, position), oldest first
        self._next = 0
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._serials)

    def __contains__(self, record_id: bytes) -> bool:
        return record_id in self._serials

    def __iter__(self) -> Iterator[Record]:
        return (self._records[s] for s in self._serials.values())

    @property
    def tokens(self) -> int:
        """Tokens of all records together."""
        return self._tokens

    def add(self, record: Record) -> tuple[bytes, ...]:
        """Index ``record`` (instead of one with the same id) and return the ids that had to go to make room.

        A record longer than ``max_tokens`` or 2^24 tokens is not indexed: its own id comes back.
        """
        self.discard(record.id)
        n = len(record.tokens)
        if self.capacity < 1 or n > min(self.max_tokens, _POSITION):
            return (record.id,)
        gone = []
        while len(self._serials) >= self.capacity or self._tokens + n > self.max_tokens:
            oldest = next(iter(self._serials))
            self.discard(oldest)
            gone.append(oldest)
        serial = self._next
        self._next += 1
        self._serials[record.id] = serial
        self._records[serial] = record
        self._tokens += n
        hashes, positions = fingerprint(record.tokens, record.salt)
        prefixes, _ = prefix_fingerprints(record.tokens, record.salt)
        base = serial << _POSITION_BITS
        pairs = chain(zip(hashes.tolist(), positions.tolist(), strict=True), ((h, 0) for h in prefixes.tolist()))
        keys: dict[int, int] = {}
        for key, position in pairs:
            places = keys.get(key, 0)
            if places == _PLACES:
                continue
            keys[key] = places + 1
            held = self._postings.get(key, ())
            if not places and len(held) >= _RECENT:
                held = _latest(held, _RECENT - 1)
            self._postings[key] = (*held, base | position)
        self._keys[serial] = list(keys)
        return tuple(gone)

    def discard(self, record_id: bytes) -> bool:
        """Forget a record; False if it was not there."""
        serial = self._serials.pop(record_id, None)
        if serial is None:
            return False
        self._tokens -= len(self._records.pop(serial).tokens)
        for key in self._keys.pop(serial):
            held = tuple(p for p in self._postings.get(key, ()) if p >> _POSITION_BITS != serial)
            if held:
                self._postings[key] = held
            else:
                self._postings.pop(key, None)
        return True

    def match(self, tokens: Tokens, salt: str = "") -> tuple[Match, ...]:
        """All runs of at least 64 tokens that ``tokens`` shares with records, and common prefixes of at least 16.

        ``tokens`` is ``[T]`` int32. Ordered by start, then the longest, then the most recent. Matched records count as
        used. Of records that share a fingerprint only the eight latest are looked at.
        """
        found: dict[tuple[int, int, int], Match] = {}
        for serial, m in chain(self._prefixes(tokens, salt), self._runs(tokens, salt)):
            found[(serial, m.source_start, m.start)] = m
        for serial in sorted({serial for serial, _, _ in found}):
            self._serials.move_to_end(self._records[serial].id)
        return tuple(sorted(found.values(), key=lambda m: (m.start, -m.end, -m.record.sequence, m.source_start)))

    def _prefixes(self, tokens: Tokens, salt: str) -> Iterator[tuple[int, Match]]:
        seen: dict[int, None] = {}
        hashes, _ = prefix_fingerprints(tokens, salt)
        for key in reversed(hashes.tolist()):
            for packed in reversed(self._postings.get(key, ())):
                seen.setdefault(packed >> _POSITION_BITS)
            if len(seen) >= _PREFIXES:
                break
        for serial in list(seen)[:_PREFIXES]:
            record = self._records[serial]
            n = min(len(tokens), len(record.tokens))
            differs = record.tokens[:n] != tokens[:n]
            length = int(differs.argmax()) if differs.any() else n
            if record.salt == salt and length >= SHORTEST_PREFIX:
                yield serial, Match(record, 0, 0, length)

    def _runs(self, tokens: Tokens, salt: str) -> Iterator[tuple[int, Match]]:
        hashes, positions = fingerprint(tokens, salt)
        for serial, diagonal in self._alignments(hashes, positions):
            record = self._records[serial]
            if record.salt != salt:
                continue
            start = max(0, diagonal)
            end = min(len(tokens), len(record.tokens) + diagonal)
            differs = record.tokens[start - diagonal : end - diagonal] != tokens[start:end]
            edges = np.concatenate([[-1], np.flatnonzero(differs), [end - start]])
            for i in np.flatnonzero(np.diff(edges) > GUARANTEE).tolist():
                a, b = start + int(edges[i]) + 1, start + int(edges[i + 1])
                yield serial, Match(record, a - diagonal, a, b)

    def _alignments(self, hashes: Hashes, positions: Positions) -> list[tuple[int, int]]:
        """(serial, prompt position − record position) pairs that fingerprints propose, at most `_ALIGNMENTS`."""
        held = [self._postings.get(h, ()) for h in hashes.tolist()]
        packed = np.fromiter(chain.from_iterable(held), np.int64)
        if not len(packed):
            return []
        here = np.repeat(positions, [len(h) for h in held])
        # serial in the high bits, diagonal (moved to be positive) in the low ones: one sort groups both
        shift, zero = _POSITION_BITS + 1, _POSITION + 1
        keys = ((packed >> _POSITION_BITS) << shift) | (here - (packed & _POSITION) + zero)
        unique, hits = np.unique(keys, return_counts=True)
        best = np.lexsort((-unique, -hits))[:_ALIGNMENTS]
        return [(k >> shift, (k & ((1 << shift) - 1)) - zero) for k in unique[best].tolist()]

    def check_integrity(self) -> None:
        """Raise AssertionError if the tables contradict one another; for tests."""
        assert set(self._serials.values()) == set(self._records) == set(self._keys)
        assert len(self._serials) <= max(self.capacity, 0)
        assert sum(len(r.tokens) for r in self._records.values()) == self._tokens <= self.max_tokens
        for key, held in self._postings.items():
            assert held, "an empty posting is never kept"
            serials = {p >> _POSITION_BITS for p in held}
            assert len(serials) <= _RECENT
            assert all(s in self._records for s in serials), "a posting names a record that is gone"
            assert list(held) == sorted(held)
            assert len(held) <= _RECENT * _PLACES, key


def _latest(held: Iterable[int], records: int) -> tuple[int, ...]:
    """The postings of the last ``records`` records."""
    held = tuple(held)
    serials = list(dict.fromkeys(p >> _POSITION_BITS for p in held))
    if len(serials) <= records:
        return held
    first = serials[-records]
    return tuple(p for p in held if p >> _POSITION_BITS >= first)
