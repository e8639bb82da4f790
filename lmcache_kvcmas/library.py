"""The records that can serve, and which stored entries each of them needs."""

from collections.abc import KeysView

from lmcache_kvcmas.fingerprint import Tokens
from lmcache_kvcmas.index import Match, RecordIndex
from lmcache_kvcmas.records import Record


class Library:
    """A `RecordIndex` that forgets a record as soon as one of its entries is lost."""

    def __init__(self, capacity: int) -> None:
        self._index = RecordIndex(capacity)
        self._needs: dict[bytes, frozenset[bytes]] = {}
        self._needed_by: dict[bytes, set[bytes]] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, record_id: bytes) -> bool:
        return record_id in self._index

    def next_sequence(self) -> int:
        """A number larger than every one before."""
        self._sequence += 1
        return self._sequence

    def add(self, record: Record) -> None:
        self._unlink(record.id)
        for gone in self._index.add(record):
            self._unlink(gone)
        if record.id in self._index:
            needs = frozenset(key for p in record.pieces for key in (p.chunk, p.delta) if key is not None)
            self._needs[record.id] = needs
            for key in needs:
                self._needed_by.setdefault(key, set()).add(record.id)

    @property
    def needs(self) -> KeysView[bytes]:
        """Keys of all entries that a record needs."""
        return self._needed_by.keys()

    def match(self, tokens: Tokens, tenant: str) -> tuple[Match, ...]:
        return self._index.match(tokens, tenant)

    def lose(self, keys: set[bytes]) -> int:
        """Forget every record that needs one of ``keys``; how many that were."""
        gone = {record for key in keys for record in self._needed_by.get(key, ())}
        for record in gone:
            self._index.discard(record)
            self._unlink(record)
        return len(gone)

    def check_integrity(self) -> None:
        """Raises AssertionError unless both sides tell the same story."""
        self._index.check_integrity()
        assert {r.id for r in self._index} == set(self._needs)
        assert all(self._needs.get(r, frozenset()) >= {k} for k, held in self._needed_by.items() for r in held)

    def _unlink(self, record: bytes) -> None:
        for key in self._needs.pop(record, ()):
            held = self._needed_by[key]
            held.discard(record)
            if not held:
                del self._needed_by[key]
