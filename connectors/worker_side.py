"""The connector's half in vLLM's workers: fetch, correct, compute, capture. One per tensor-parallel rank."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group

from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors.capturer import Capturer
from lmcache_kvcmas.connectors.judge import MISSING, Judge, Started, Verdict, ranges_of
from lmcache_kvcmas.connectors.messages import Judged, Load, Outcome, StepWork, WorkerReport
from lmcache_kvcmas.connectors.nested import NestedForward, Range
from lmcache_kvcmas.connectors.paged import PagedCache
from lmcache_kvcmas.connectors.prefetcher import Prefetcher
from lmcache_kvcmas.edges import EdgeBook, Ready
from lmcache_kvcmas.hot import HotTier
from lmcache_kvcmas.kernels.rope import RopeTable
from lmcache_kvcmas.keys import KeySpace
from lmcache_kvcmas.learner import Learner, Refresh
from lmcache_kvcmas.model import ModelGeometry
from lmcache_kvcmas.shared import News, PoolNews
from lmcache_kvcmas.sources import fetch_all
from lmcache_kvcmas.spans import Piece, SpanKind
from lmcache_kvcmas.store import EntryStore
from lmcache_kvcmas.takeover import Prediction, predict, take_over

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LESSON_BYTES = 1 << 30  # of captured runs that may wait for the learner; more than that is not learned

_LOAD_FAILED = "load_failed"
_NESTED_FAILED = "nested_failed"


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
        self.learner = Learner(store, self._book, rope, settings.rank, settings.anchor_tokens, _LESSON_BYTES)
        self._judge = Judge(geometry.layers, paged.device)
        self.nested: NestedForward | None = None
        self.counts: Counter[str] = Counter()
        self._capturer = Capturer(store, self._hot, self.learner, paged, geometry, self.counts)
        self._prefetcher = Prefetcher(store) if store.shared is not None else None
        self._failed_blocks: set[int] = set()
        self._saved: set[str] = set()
        self._told: set[str] = set()
        self._outcomes: dict[str, Outcome] = {}
        self._lost: set[bytes] = set()

    def use_nested(self, nested: NestedForward) -> None:
        """Compute heads and gaps with ``nested``, if it proves itself. Raises UnsupportedEngineError if it does not."""
        nested.prove(self._paged)
        self.nested = nested

    @torch.inference_mode()
    def step(self, work: StepWork) -> None:
        """Captures first, so that a request may read in the same step what the one before it left."""
        for prefetch in work.prefetches:
            if self._prefetcher is not None:
                self._prefetcher.submit(prefetch)
        for save in work.saves:
            self._attempt("capture_failed", partial(self._capturer.save, save), None)
            self._saved.add(save.request)
        if not work.loads:
            return
        begun = time.perf_counter()
        started = [
            self._attempt(_LOAD_FAILED, partial(self._load, load), Started([], load.spans[0].start, _LOAD_FAILED))
            for load in work.loads
        ]
        ranges: list[Range] = []
        for load, start in zip(work.loads, started, strict=True):
            verdict = self._judge.judge(load, start, self._settings, get_tp_group())
            self._outcomes[load.request] = self._concluded(load, verdict)
            # Every rank runs the same ranges, whatever its own loads came to: the model's collectives count on it.
            ranges += ranges_of(load, verdict)
        if ranges and not self._computed(ranges):
            for load in work.loads:
                self._outcomes[load.request] = self._failed(load, load.spans[0].start, _NESTED_FAILED, ())
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
        self._lost.update(self.store.take_evicted(), self._capturer.take_lost())
        prefetched = self._prefetcher.take() if self._prefetcher is not None else {}
        report = WorkerReport(self._outcomes, self._book.take_changed(), self._lost, prefetched)
        self._outcomes, self._lost = {}, set()
        if not (report.outcomes or report.anchors or report.lost or report.prefetched):
            return None
        counts = dict(self.counts) | {f"learner.{k}": v for k, v in self.learner.counts.items()}
        if self.store.shared is not None:
            counts |= {f"shared.{k}": v for k, v in self.store.shared.counts.items()}
        report.counts = {get_tp_group().rank_in_group: counts}
        return report

    def hear(self, news: News) -> None:
        """What other nodes did. May be called from any thread."""
        if isinstance(news, PoolNews):
            self.learner.submit(Refresh(news.tenant, news.edge))

    def close(self) -> None:
        self.learner.close()
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._hot.clear()
        self.store.close()

    # loading

    def _load(self, load: Load) -> Started:
        """Write all spans of one load, up to the first whose cache cannot be had."""
        with ExitStack() as leases:
            return self._write_spans(load, leases)

    def _write_spans(self, load: Load, leases: ExitStack) -> Started:
        predictions: list[tuple[Prediction, Ready]] = []
        for span in load.spans:
            if span.kind is SpanKind.COMPUTE:
                continue
            sources = fetch_all(self.store, self._hot, span.pieces, self._paged.device, leases, self._geometry)
            if isinstance(sources, Piece):
                keys = (key for key in (sources.chunk, sources.delta) if key is not None)
                self._lost.update(key for key in keys if not self.store.contains(key))
                return Started(predictions, sources.start, MISSING)
            slots = self._paged.slots(load.block_ids, span.start, span.end)

            def write(layer: int, k: Tensor, v: Tensor, slots: Tensor = slots) -> None:
                self._paged.write(layer, slots, k, v)

            if span.edge is None:
                take_over(span, sources, self._rope, self._paged.dtype, write)
            else:
                ready = self._book.ready(load.tenant, span.edge)
                prediction = predict(span, sources, ready.predictor, self._rope, self._paged.dtype, write)
                predictions.append((prediction, ready))
        return Started(predictions)

    def _concluded(self, load: Load, verdict: Verdict) -> Outcome:
        """Account for a verdict, and report what cannot be used."""
        outcome = verdict.outcome
        for said in outcome.judged:
            self.counts[f"gate.{said.reason}"] += 1
        for prediction, ready in verdict.accepted:
            if prediction.mass is not None:
                self._book.credit(ready, prediction.mass)
        if outcome.failed_from is None:
            return outcome
        return self._failed(load, outcome.failed_from, outcome.cause or _LOAD_FAILED, outcome.judged)

    def _failed(self, load: Load, start: int, cause: str, judged: Sequence[Judged]) -> Outcome:
        """vLLM computes ``load`` from ``start`` on."""
        block = self._paged.block
        self._failed_blocks.update(load.block_ids[start // block : (load.spans[-1].end - 1) // block + 1])
        self.counts[cause] += 1
        return Outcome(tuple(judged), start, cause)

    def _computed(self, ranges: Sequence[Range]) -> bool:
        """Run the model over ``ranges``; False if it could not.

        Where other ranks take part, this process ends then, and vLLM ends the engine: the others wait in collectives
        that this rank does not come to, and would take its next ones for those. An error would be no help: vLLM waits
        for the others' answers before it looks at this one's.
        """
        computed = self._attempt(_NESTED_FAILED, partial(self._compute, ranges), False)
        if not computed and get_tp_group().world_size > 1:
            raise SystemExit("kvcmas: a nested forward failed on one of several tensor-parallel ranks")
        return computed

    def _compute(self, ranges: Sequence[Range]) -> bool:
        assert self.nested is not None
        self.nested.run(ranges)
        return True

    def _attempt(self, cause: str, action: Callable[[], T], otherwise: T) -> T:
        """Nothing that goes wrong in ``action`` may end the engine: counted, logged once, and made good densely."""
        try:
            return action()
        except Exception:
            self.counts[cause] += 1
            if cause not in self._told:
                self._told.add(cause)
                logger.exception("kvcmas: %s; where it happens, the engine computes densely", cause)
            return otherwise
