"""The connector's half in vLLM's scheduler: match, plan, and lay out what finished requests leave. No tensors here."""

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

from lmcache_kvcmas.agents import AgentRegistry
from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors.known_request import KnownRequest, not_eligible, report_of
from lmcache_kvcmas.connectors.messages import Load, Outcome, Prefetched, Save, StepWork, WorkerReport
from lmcache_kvcmas.connectors.metrics import TOKENS
from lmcache_kvcmas.connectors.neighbours import Neighbours, entries_of, first_without
from lmcache_kvcmas.connectors.prefix_tag import tag_blocks
from lmcache_kvcmas.fingerprint import Tokens
from lmcache_kvcmas.hints import parse_hints
from lmcache_kvcmas.keys import KeySpace
from lmcache_kvcmas.layout import lay_out
from lmcache_kvcmas.library import Library
from lmcache_kvcmas.planner import Planner
from lmcache_kvcmas.plans import computed_instead, plan_tag, shorten, without_approximation
from lmcache_kvcmas.records import Record, record_content
from lmcache_kvcmas.report import HopReport
from lmcache_kvcmas.shared import PoolNews
from lmcache_kvcmas.spans import Edge, Span, SpanKind
from lmcache_kvcmas.tenants import tenant_name

logger = logging.getLogger(__name__)

_ARRIVAL_SECONDS = 0.02
_STEP_SECONDS = 0.002


class SchedulerSide:
    """One per engine. ``hash_block`` is the number of tokens that one of vLLM's block hashes stands for."""

    def __init__(
        self,
        settings: Settings,
        chunk_tokens: int,
        model: str,
        hash_block: int,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._settings, self._chunk_tokens, self._model = settings, chunk_tokens, model
        self._hash_block = hash_block
        self._neighbours = neighbours
        self._library = Library(settings.max_records)
        self._registry = AgentRegistry()
        self._requests: dict[str, KnownRequest] = {}
        self._unreported: dict[str, tuple[KnownRequest, Tokens, list[int]]] = {}
        self._anchors: dict[tuple[str, Edge], int] = {}
        self._versions: Counter[tuple[str, Edge]] = Counter()
        self._work = StepWork()
        self._complaints: set[str] = set()
        self._worker_counts: dict[int, dict[str, int]] = {}
        self.counts: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self.set_nested(False)  # until the workers say otherwise

    def set_nested(self, works: bool) -> None:
        """Whether every worker can compute heads and gaps."""
        s = self._settings
        self._planner = Planner(
            min_run=s.min_run_tokens,
            head=s.head_tokens,
            max_gap=s.max_gap_tokens,
            min_anchors=s.min_anchors,
            nested=works and s.nested,
            predictor_learns=s.predictor_learns,
        )

    def arrived(self, request: Any) -> None:
        """Plan a new request, and keep its approximate blocks apart in vLLM's prefix cache."""
        refused = not_eligible(request)
        if refused:
            self.counts[f"not_eligible.{refused}"] += 1
            return
        self._hear(_ARRIVAL_SECONDS)
        hints, problems = parse_hints(request.kv_transfer_params)
        for problem in problems:
            self._complain(problem)
        tokens = np.asarray(request.prompt_token_ids, dtype=np.int32)
        tenant = tenant_name(self._settings.salt, request.cache_salt)
        plan = self._planner.plan(
            tokens,
            self._library.match(tokens, tenant),
            hints,
            self._registry,
            lambda edge: self._anchors.get((tenant, edge), 0),
            salt=tenant,
        )
        tag = plan_tag(plan, lambda edge: self._versions[tenant, edge])
        used = without_approximation(plan)
        known = KnownRequest(tokens, tenant, hints, plan, plan, used, tag)
        self._requests[request.request_id] = known
        if self._neighbours is not None:
            prefetches, known.waiting = self._neighbours.send_for(request.request_id, plan)
            self._work.prefetches += prefetches
            self.counts["prefetches"] += known.waiting is not None
        if plan.first_approximate is not None:
            tag_blocks(request, plan.first_approximate // self._hash_block, tag)

    def matched(self, request: Any, local: int) -> int | None:
        """Tokens that the plan gives beyond the ``local`` ones that vLLM has; None for: ask again.

        May be asked again and again.
        """
        known = self._requests.get(request.request_id)
        if known is None:
            return 0
        known.local = local
        if known.waiting is not None and known.offered.covered > local:
            if not known.waiting.too_long:
                return None
            missing = {n.key for n in entries_of(p for s in known.offered.spans for p in s.pieces)}
            self._go_on(known, missing, "late")
        covered: int = min(known.offered.covered, request.num_tokens - 1)
        return max(0, covered - local)

    def allocated(self, request: Any, block_ids: list[int], external: int) -> None:
        """vLLM has blocks for the request, and wants ``external`` tokens from us."""
        known = self._requests.get(request.request_id)
        if known is None:
            return
        first = known.planned.first_approximate
        if first is not None and known.local > first:
            known.used = known.planned  # from blocks that an earlier request with the same plan left in vLLM
        if external > 0:
            start, end = known.local, known.local + external
            spans = tuple(s.clip(start, end) for s in known.offered.spans if s.start < end and s.end > start)
            tokens = tuple(self._computable(known.tokens, s) for s in spans)
            load = Load(request.request_id, known.tenant, tuple(block_ids), spans, tokens, known.tag)
            self._work.loads.append(load)
            known.loading = True
            known.to_choose = sum(map(self._to_choose, spans))

    def _computable(self, tokens: Tokens, span: Span) -> tuple[int, ...]:
        """The tokens of a span that is computed in place, or will be if the gate refuses it, or of which some are."""
        short = self._planner.nested and span.end - span.start <= self._settings.max_gap_tokens
        refusable = span.kind is SpanKind.PREDICTED and short
        if span.kind is SpanKind.COMPUTE or refusable or self._to_choose(span):
            return tuple(tokens[span.start : span.end].tolist())
        return ()

    def _to_choose(self, span: Span) -> int:
        """How many tokens of a span are recomputed if the gate accepts it."""
        predicted = span.kind is SpanKind.PREDICTED and self._planner.nested
        return self._settings.recomputed(span.end - span.start) if predicted else 0

    def take_work(self) -> StepWork:
        """What the workers have to do in this step."""
        self._hear(_STEP_SECONDS)
        work, self._work = self._work, StepWork()
        return work

    def reported(self, report: WorkerReport) -> None:
        """Learn what became of earlier steps' work."""
        for request, outcome in report.outcomes.items():
            if request in self._unreported:
                known, tokens, block_ids = self._unreported.pop(request)
                self._concluded(known, outcome)
                self._count(report_of(known))
                if not self._capture(request, known, tokens, block_ids):
                    self._work.saves.append(Save(request, known.tenant, (), (), (), False))  # lets go of its blocks
            elif request in self._requests:
                self._concluded(self._requests[request], outcome)
        for edge, count in report.anchors.items():
            self._anchors[edge] = count
            self._versions[edge] += 1
        if report.counts:
            self._worker_counts |= report.counts
            for name, count in sum(map(Counter, self._worker_counts.values()), Counter()).items():
                self.counts[f"worker.{name}"] = count
        for name, prefetched in report.prefetched.items():
            self._prefetched(name, prefetched)
        if report.lost and self._neighbours is not None:
            self._neighbours.lost(report.lost)
        elif report.lost:
            self.counts["records_lost"] += self._library.lose(report.lost)

    def _prefetched(self, request: str, part: Prefetched) -> None:
        """Entries came from the shared tier, or did not: records whose entries no tier holds are of no use."""
        assert self._neighbours is not None
        if part.gone:
            self.counts["records_lost"] += self._library.lose(set(part.gone))
            self._neighbours.held(part.gone)
        known = self._requests.get(request)
        if known is None or known.waiting is None or not known.waiting.heard(part):
            return
        missing = known.waiting.missing
        came = {n.key for n in entries_of(p for s in known.offered.spans for p in s.pieces)} - missing
        self._neighbours.held(came)
        known.waiting = None
        if missing:
            self._go_on(known, missing, "missing")

    def _go_on(self, known: KnownRequest, missing: set[bytes], why: str) -> None:
        """Offer what stands in front of the first entry that did not come."""
        known.waiting = None
        known.offered = shorten(known.offered, first_without(known.offered, missing))
        self.counts[f"dense.prefetch_{why}"] += 1

    def catch_up(self, seconds: float) -> None:
        """Take in what other nodes left before this engine started."""
        if self._neighbours is not None:
            self._neighbours.catch_up(seconds)
            self._hear(seconds)

    def _hear(self, seconds: float) -> None:
        """Take in what other nodes did, for about ``seconds`` at most."""
        if self._neighbours is None:
            return
        for news in self._neighbours.news(seconds):
            if isinstance(news, PoolNews):
                edge = (news.tenant, news.edge)
                self._anchors[edge] = max(news.anchors, self._anchors.get(edge, 0))
                self._versions[edge] += 1
            elif news.record.id not in self._library:
                self._library.add(replace(news.record, sequence=self._library.next_sequence()))
                self._neighbours.left(news.record)
                self.counts["records_heard"] += 1
        self._neighbours.forget_unneeded(self._library.needs)

    def close(self) -> None:
        if self._neighbours is not None:
            self._neighbours.close()

    def _concluded(self, known: KnownRequest, outcome: Outcome) -> None:
        known.loading = False
        known.outcome = outcome
        refused = {j.start for j in outcome.judged if j.computed}
        known.used = computed_instead(known.offered, refused)
        if outcome.failed_from is not None:
            # vLLM computes from there on; should it be preempted, it does not try again.
            known.used = shorten(known.used, outcome.failed_from)
            known.offered = without_approximation(known.used)
            self.counts[f"dense.{outcome.cause}"] += 1

    def finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Lay out what the request leaves. True if its blocks must stay until the workers have read them."""
        known = self._requests.pop(request.request_id, None)
        if known is None or request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
            return False, None
        report = report_of(known)
        answer = {"kvcmas": report.as_json()}
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        if not (self._settings.capture and known.hints.capture) or computed < 1:
            self._count(report)
            return False, answer
        tokens = np.asarray(request.all_token_ids[:computed], dtype=np.int32)
        if known.loading:
            self._unreported[request.request_id] = (known, tokens, list(block_ids))
            return True, answer
        self._count(report)
        return self._capture(request.request_id, known, tokens, block_ids), answer

    def _capture(self, request: str, known: KnownRequest, tokens: Tokens, block_ids: list[int]) -> bool:
        """Add the record of ``tokens``, whose cache exists; False if there is nothing to write for it."""
        plan = known.used
        keys = KeySpace(self._model, known.tenant)
        ehat2 = {
            i: j.ehat**2
            for i, lesson in enumerate(plan.lessons)
            for j in known.outcome.judged
            if lesson.start <= j.start < lesson.end
        }
        layout = lay_out(
            plan,
            tokens,
            prompt_tokens=len(known.tokens),
            accepted=known.approximate,
            tag=known.tag,
            ehat2=ehat2,
            chunk_tokens=self._chunk_tokens,
            min_run=self._settings.min_run_tokens,
            codec=self._settings.base_codec,
            base_key=keys.base,
            delta_key=keys.delta,
        )
        record = Record(
            id=keys.record(record_content(tokens, plan.agent)),
            tokens=tokens,
            prompt_tokens=min(len(known.tokens), len(tokens)),
            pieces=layout.pieces,
            segments=layout.segments,
            agent=plan.agent,
            workflow=known.hints.workflow,
            salt=known.tenant,
            sequence=self._library.next_sequence(),
        )
        self._library.add(record)
        if self._neighbours is not None:
            self._neighbours.held(write.key for write in layout.writes)
        learn = self._settings.learn and not known.approximate and len(tokens) >= len(known.tokens)
        if not layout.writes and not (learn and plan.lessons):
            return False
        told = record if self._neighbours is not None else None
        self._work.saves.append(Save(request, known.tenant, tuple(block_ids), layout.writes, plan.lessons, learn, told))
        return True

    def _count(self, report: HopReport) -> None:
        self.counts[f"decision.{report.decision}"] += 1
        for origin in ("shared", "reused", "recomputed", "exact", "dense"):
            self.counts[f"{TOKENS}{origin}"] += getattr(report, f"{origin}_tokens")

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        new = {name: n - self._told[name] for name, n in self.counts.items() if n > self._told[name]}
        self._told = self.counts.copy()
        return new

    def forget(self) -> None:
        """Forget all records: the store's entries stay until they make room, but nothing points at them."""
        self._library = Library(self._settings.max_records)

    def _complain(self, problem: str) -> None:
        self.counts["bad_hints"] += 1
        if problem not in self._complaints and len(self._complaints) < 1000:
            self._complaints.add(problem)
            logger.warning("kvcmas: %s", problem)
