"""The connector's half in vLLM's workers: fetch, correct, compute, capture. One per tensor-parallel rank."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group

from lmcache_kvcmas.anchors import AnchorPool
from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors.messages import Judged, Load, Outcome, Save, StepWork, WorkerReport
from lmcache_kvcmas.connectors.nested import NestedForward, Range
from lmcache_kvcmas.connectors.paged import PagedCache
from lmcache_kvcmas.edges import EdgeBook
from lmcache_kvcmas.entries import EntryKind, TensorSpec
from lmcache_kvcmas.gate import decide, ehat_of
from lmcache_kvcmas.hot import HotRun, HotTier
from lmcache_kvcmas.kernels.rope import RopeTable
from lmcache_kvcmas.keys import KeySpace
from lmcache_kvcmas.layout import ChunkWrite
from lmcache_kvcmas.learner import Compress, Learn, Learner
from lmcache_kvcmas.lessons import Stretch
from lmcache_kvcmas.model import ModelGeometry
from lmcache_kvcmas.sources import Source, fetch, fetch_root
from lmcache_kvcmas.spans import Piece, Span, SpanKind
from lmcache_kvcmas.store import EntryStore
from lmcache_kvcmas.takeover import Prediction, predict, take_over

logger = logging.getLogger(__name__)

_MISSING = "missing_entry"


class WorkerSide:
    """Carries out what the scheduler planned. Whatever fails ends in blocks that vLLM computes itself."""

    def __init__(
        self, settings: Settings, geometry: ModelGeometry, store: EntryStore, paged: PagedCache, rope: RopeTable
    ) -> None:
        self._settings, self._geometry, self.store, self._paged = settings, geometry, store, paged
        self._rope = rope
        self._hot = HotTier(settings.hot_bytes)
        self._book = EdgeBook(
            store,
            lambda tenant: KeySpace(geometry.fingerprint, tenant),
            settings.predictor,
            settings.max_anchors,
            paged.device,
        )
        self.learner = Learner(store, self._book, rope, settings.rank, settings.anchor_tokens, settings.hot_bytes)
        self.nested: NestedForward | None = None
        self.counts: Counter[str] = Counter()
        self._failed_blocks: set[int] = set()
        self._saved: set[str] = set()
        self._outcomes: dict[str, Outcome] = {}
        self._lost: set[bytes] = set()

    def use_nested(self, nested: NestedForward) -> None:
        """Compute heads and gaps with ``nested``, if it proves itself. Raises UnsupportedEngineError if it does not."""
        nested.prove(self._paged)
        self.nested = nested

    @torch.inference_mode()
    def step(self, work: StepWork) -> None:
        """Captures first, so that a request may read in the same step what the one before it left."""
        for save in work.saves:
            self._save(save)
        if not work.loads:
            return
        begun = time.perf_counter()
        started = [self._load(load) for load in work.loads]
        self._judge(work.loads, started)
        # Every rank runs the same ranges, whatever its own loads came to: the model's collectives count on it.
        ranges = [
            Range(load.tokens[s.start - load.spans[0].start : s.end - load.spans[0].start], s.start, load.block_ids)
            for load in work.loads
            for s in load.spans
            if s.kind is SpanKind.COMPUTE and not self._refused(load, s)
        ]
        if ranges and self.nested is not None:
            self.nested.run(ranges)
        self.counts["loads"] += len(work.loads)
        self.counts["load_us"] += int(1e6 * (time.perf_counter() - begun))

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_saved(self) -> set[str]:
        saved, self._saved = self._saved, set()
        return saved

    def take_report(self) -> WorkerReport | None:
        """What the scheduler does not know yet; None if it knows all."""
        self._lost.update(self.store.take_evicted())
        report = WorkerReport(self._outcomes, self._book.take_changed(), self._lost)
        self._outcomes, self._lost = {}, set()
        if not (report.outcomes or report.anchors or report.lost):
            return None
        report.counts = dict(self.counts) | {f"learner.{k}": v for k, v in self.learner.counts.items()}
        report.store_bytes = self.store.stats().bytes_used
        return report

    def close(self) -> None:
        self.learner.close()
        self._hot.clear()
        self.store.close()

    # loading

    def _load(self, load: Load) -> "_Started":
        """Write all spans of one load, up to the first whose cache cannot be had."""
        predictions: list[tuple[Prediction, AnchorPool, int]] = []
        failed_from: int | None = None
        with ExitStack() as leases:
            for span in load.spans:
                if span.kind is SpanKind.COMPUTE:
                    continue
                sources = self._fetch(span.pieces, leases)
                if isinstance(sources, Piece):
                    # The rest of the span still counts for what other ranks do; nothing of it is used.
                    failed_from = sources.start
                    break
                slots = self._paged.slots(load.block_ids, span.start, span.end)

                def write(layer: int, k: Tensor, v: Tensor, slots: Tensor = slots) -> None:
                    self._paged.write(layer, slots, k, v)

                if span.edge is None:
                    take_over(span, sources, self._rope, self._paged.dtype, write)
                else:
                    predictor, pool = self._book.predictor(load.tenant, span.edge)
                    prediction = predict(span, sources, predictor, self._rope, self._paged.dtype, write)
                    predictions.append((prediction, pool, predictor.version))
        return _Started(predictions, failed_from)

    def _fetch(self, pieces: Sequence[Piece], leases: ExitStack) -> "list[Source] | Piece":
        """A source for each piece, or the first piece that has none."""
        found = []
        for piece in pieces:
            source = fetch(self.store, self._hot, piece, self._paged.device, leases)
            if source is None:
                self._lost.update(
                    key for key in (piece.chunk, piece.delta) if key is not None and not self.store.contains(key)
                )
                self.counts[_MISSING] += 1
                return piece
            found.append(source)
        return found

    def _judge(self, loads: Sequence[Load], started: "Sequence[_Started]") -> None:
        """Ask the gate about every predicted span, on the sums of all ranks, and report what is refused."""
        for load, start in zip(loads, started, strict=True):
            spans = [s for s in load.spans if s.edge is not None]
            if spans:
                self._add_up(spans, start)
            judged: list[Judged] = []
            failed, cause = start.failed_from, None if start.failed_from is None else _MISSING
            for prediction, pool, version in start.predictions:
                span = prediction.span
                assert span.edge is not None
                s = self._settings
                decision = decide(
                    ehat_of(prediction.sums),
                    span.error2,
                    theta=s.theta,
                    chain_theta=s.chain_theta,
                    anchors=len(pool) if s.predictor != "none" else s.min_anchors,
                    min_anchors=s.min_anchors,
                )
                reason = decision.reason.value
                judged.append(
                    Judged(span.start, span.end, span.edge, decision.ehat, len(pool), decision.accepted, reason)
                )
                self.counts[f"gate.{reason}"] += 1
                if not decision.accepted:
                    if failed is None or span.start < failed:
                        failed, cause = span.start, reason
                    break
                if prediction.mass is not None:
                    pool.credit(prediction.mass, version)
            if failed is not None:
                self._fail(load, failed)
            self._outcomes[load.request] = Outcome(tuple(judged), failed, cause)

    def _add_up(self, spans: Sequence[Span], start: "_Started") -> None:
        """Sum the gate's terms over the tensor-parallel ranks, which have different heads of the same tokens."""
        group = get_tp_group()
        if group.world_size == 1:
            return
        sums = torch.zeros(len(spans), self._geometry.layers, 2, 2, device=self._paged.device)
        for to, (prediction, _, _) in zip(sums, start.predictions, strict=False):
            to.copy_(prediction.sums)
        sums = group.all_reduce(sums)
        for total, (prediction, _, _) in zip(sums, start.predictions, strict=False):
            prediction.sums.copy_(total)

    def _fail(self, load: Load, start: int) -> None:
        block = self._paged.block
        end = load.spans[-1].end
        self._failed_blocks.update(load.block_ids[start // block : (end - 1) // block + 1])

    def _refused(self, load: Load, span: Span) -> bool:
        """Whether ``span`` stands behind one that the gate refused, which all ranks know of alike."""
        outcome = self._outcomes[load.request]
        refused = [j.start for j in outcome.judged if not j.accepted]
        return bool(refused) and span.start >= min(refused)

    # capturing

    def _save(self, save: Save) -> None:
        """Read what a finished request left, before its blocks are used again."""
        runs: dict[int, HotRun] = {}
        for index, lesson in enumerate(save.lessons):
            needed = any(not isinstance(w, ChunkWrite) and w.lesson == index for w in save.writes)
            if needed or save.learn:
                runs[index] = self._read(save.block_ids, lesson.start, lesson.end)
        for write in save.writes:
            if isinstance(write, ChunkWrite):
                self._save_chunk(save, write)
                continue
            run = runs[write.lesson]
            rows = slice(write.start - run.position, write.end - run.position)
            part = HotRun(run.k[:, rows], run.v[:, rows], write.start)
            self._hot.put(write.key, part)
            leases = ExitStack()
            roots = [fetch_root(self.store, p, self._paged.device, leases) for p in write.bases]
            whole = [r for r in roots if r is not None]
            if len(whole) < len(roots) or self.store.contains(write.key):
                leases.close()
                continue
            self.learner.submit(Compress(write.key, part, Stretch(whole), leases))
        if save.learn:
            self._learn(save, runs)
        self._saved.add(save.request)
        self.counts["saves"] += 1

    def _save_chunk(self, save: Save, write: ChunkWrite) -> None:
        if self.store.contains(write.key):
            return
        shape = TensorSpec((self._geometry.layers, write.end - write.start, self._geometry.channels), self._paged.dtype)
        room = self.store.reserve(write.key, EntryKind.BASE, {"k": shape, "v": shape}, {"position": write.start})
        if room is None:
            self._lost.add(write.key)
            self.counts["no_room"] += 1
            return
        self._paged.read(save.block_ids, write.start, write.end, room.tensors["k"], room.tensors["v"])
        if not room.commit():
            self._lost.add(write.key)

    def _learn(self, save: Save, runs: dict[int, HotRun]) -> None:
        for index, lesson in enumerate(save.lessons):
            if lesson.edge.source == lesson.edge.destination:
                continue
            leases = ExitStack()
            sources = self._fetch(lesson.pieces, leases)
            if isinstance(sources, Piece):
                leases.close()
                continue
            task = Learn(save.tenant, lesson.edge, runs[index], Stretch(sources), lesson.offset, leases)
            self.learner.submit(task)

    def _read(self, block_ids: Sequence[int], start: int, end: int) -> HotRun:
        shape = (2, self._geometry.layers, end - start, self._geometry.channels)
        k, v = torch.empty(shape, dtype=self._paged.dtype, device=self._paged.device)
        self._paged.read(block_ids, start, end, k, v)
        return HotRun(k, v, start)


class _Started:
    """What one load came to, before the gate."""

    def __init__(self, predictions: list[tuple[Prediction, AnchorPool, int]], failed_from: int | None) -> None:
        self.predictions, self.failed_from = predictions, failed_from
