"""Brings entries from the shared tier while their request waits, so that no step waits for a network."""

import logging
import queue
import threading

from lmcache_kvcmas.connectors.messages import Prefetch, Prefetched
from lmcache_kvcmas.store import EntryStore, NotHad

logger = logging.getLogger(__name__)

_THREADS = 2  # one batch waits for the network while another is copied


class Prefetcher:
    """Works through prefetches in order; each takes one time-out of the shared tier at most."""

    def __init__(self, store: EntryStore) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[Prefetch | None] = queue.SimpleQueue()
        self._done: dict[str, Prefetched] = {}
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvcmas-prefetch-{i}", daemon=True) for i in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, prefetch: Prefetch) -> None:
        self._queue.put(prefetch)

    def take(self) -> dict[str, Prefetched]:
        """What was finished since the last call, by request."""
        with self._lock:
            done, self._done = self._done, {}
            return done

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (prefetch := self._queue.get()) is not None:
            try:
                not_had = self._store.prefetch(prefetch.wanted)
            except Exception:
                logger.exception("kvcmas: a prefetch failed")
                not_had = NotHad(unreachable=prefetch.wanted)
            with self._lock:
                self._done[prefetch.request] = Prefetched(
                    frozenset(entry.key for entry in not_had.gone),
                    frozenset(entry.key for entry in not_had.unreachable),
                )
