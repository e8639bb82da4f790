"""Reads what finished requests left in the paged cache, and hands it to the store and the learner."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from lmcache_kvcmas import codecs
from lmcache_kvcmas.connectors.messages import Save
from lmcache_kvcmas.connectors.paged import PagedCache
from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.hot import HotRun, HotTier
from lmcache_kvcmas.layout import ChunkWrite, DeltaWrite
from lmcache_kvcmas.learner import Compress, Learn, Learner, Publish
from lmcache_kvcmas.lessons import Stretch
from lmcache_kvcmas.model import ModelGeometry
from lmcache_kvcmas.sources import fetch_all, fetch_root
from lmcache_kvcmas.spans import Edge, Piece
from lmcache_kvcmas.store import EntryStore


class Capturer:
    """Must run before the request's blocks are used again; whatever takes time is left to the learner."""

    def __init__(
        self,
        store: EntryStore,
        hot: HotTier,
        learner: Learner,
        paged: PagedCache,
        geometry: ModelGeometry,
        counts: Counter[str],
    ) -> None:
        self._store, self._hot, self._learner = store, hot, learner
        self._paged, self._geometry, self._counts = paged, geometry, counts
        self._lost: set[bytes] = set()

    def save(self, save: Save) -> None:
        """Carry out one request's writes, and its lessons."""
        compressed = {w.lesson for w in save.writes if isinstance(w, DeltaWrite)}
        runs = {
            index: self._read(save.block_ids, lesson.start, lesson.end)
            for index, lesson in enumerate(save.lessons)
            if save.learn or index in compressed
        }
        for write in save.writes:
            if isinstance(write, ChunkWrite):
                self._save_chunk(save.block_ids, write)
            else:
                self._save_delta(write, save.lessons[write.lesson].edge, runs[write.lesson])
        if save.learn:
            self._learn(save, runs)
        if save.record is not None:
            self._learner.submit(Publish(save.record))
        self._counts["saves"] += 1

    def take_lost(self) -> set[bytes]:
        """Keys that could not be stored since the last call."""
        lost, self._lost = self._lost, set()
        return lost

    def _save_chunk(self, block_ids: Sequence[int], write: ChunkWrite) -> None:
        if self._store.contains(write.key):
            return
        g, tokens, dtype = self._geometry, write.end - write.start, self._paged.dtype
        shapes = codecs.specs(write.codec, g.layers, tokens, g.kv_heads, g.head_dim, dtype)
        meta = codecs.meta(write.codec, write.start, g.kv_heads, dtype)
        room = self._store.reserve(write.key, EntryKind.BASE, shapes, meta)
        if room is None:
            self._lost.add(write.key)
            self._counts["no_room"] += 1
            return
        if write.codec == codecs.RAW:
            self._paged.read(block_ids, write.start, write.end, room.tensors["k"], room.tensors["v"])
        else:
            run = self._read(block_ids, write.start, write.end)
            codecs.write(write.codec, run.k, run.v, g.kv_heads, room.tensors)
        if not room.commit():
            self._lost.add(write.key)

    def _save_delta(self, write: DeltaWrite, edge: Edge, run: HotRun) -> None:
        """The run as it is until its difference is factorised; then the difference."""
        rows = slice(write.start - run.position, write.end - run.position)
        part = HotRun(run.k[:, rows], run.v[:, rows], write.start)
        self._hot.put(write.key, part)
        if self._store.contains(write.key):
            return
        leases = ExitStack()
        roots = [fetch_root(self._store, p, self._paged.device, leases, self._geometry) for p in write.bases]
        whole = [r for r in roots if r is not None]
        if len(whole) < len(roots):
            leases.close()
            return
        self._learner.submit(Compress(write.key, edge, part, Stretch(whole), leases))

    def _learn(self, save: Save, runs: dict[int, HotRun]) -> None:
        for index, lesson in enumerate(save.lessons):
            if lesson.edge.source == lesson.edge.destination:
                continue
            leases = ExitStack()
            sources = fetch_all(self._store, self._hot, lesson.pieces, self._paged.device, leases, self._geometry)
            if isinstance(sources, Piece):
                leases.close()
                self._counts["lesson_without_source"] += 1
                continue
            task = Learn(save.tenant, lesson.edge, runs[index], Stretch(sources), lesson.offset, leases)
            self._learner.submit(task)

    def _read(self, block_ids: Sequence[int], start: int, end: int) -> HotRun:
        shape = (2, self._geometry.layers, end - start, self._geometry.channels)
        k, v = torch.empty(shape, dtype=self._paged.dtype, device=self._paged.device)
        self._paged.read(block_ids, start, end, k, v)
        return HotRun(k, v, start)
