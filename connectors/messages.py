"""What the scheduler's half of the connector and the workers' half tell each other."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_kvcmas.layout import Write
from lmcache_kvcmas.manifest import Needed
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.spans import Edge, Lesson, Span


@dataclass(frozen=True, slots=True)
class Load:
    """Give a request the cache of its spans, before this step's forward."""

    request: str
    tenant: str
    block_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    """Contiguous, from the first token that vLLM does not have."""
    tokens: tuple[tuple[int, ...], ...]
    """Of each span that the model computes, or may have to, whole or in part; empty for others."""
    tag: bytes = b""
    """`plans.plan_tag` of the plan that the spans are a part of."""


@dataclass(frozen=True, slots=True)
class Save:
    """Keep what a finished request left; its blocks are held until this is done."""

    request: str
    tenant: str
    block_ids: tuple[int, ...]
    writes: tuple[Write, ...]
    lessons: tuple[Lesson, ...]
    learn: bool
    """Everything was computed densely: the lessons' differences are true, and go to the pools."""
    record: Record | None = None
    """For other nodes; None if there are none."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring a request's entries from the shared tier, before it is scheduled."""

    request: str
    wanted: tuple[Needed, ...]


@dataclass
class StepWork(KVConnectorMetadata):
    """Scheduler → workers, each step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    prefetches: list[Prefetch] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Judged:
    """What the gate said about one predicted span."""

    start: int
    end: int
    edge: Edge
    ehat: float
    anchors: int
    accepted: bool
    reason: str
    computed: bool = False
    """Refused, and computed in place instead."""
    recomputed: int = 0
    """Tokens of an accepted span that were chosen to be recomputed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one load."""

    judged: tuple[Judged, ...] = ()
    failed_from: int | None = None
    """First position whose cache could not be given: an entry is missing, or the gate refused too much to compute."""
    cause: str | None = None

    def joined(self, other: "Outcome") -> "Outcome":
        """Of two ranks: what one of them could not give, the request does not have."""
        failed = [o for o in (self, other) if o.failed_from is not None]
        worst = min(failed, key=lambda o: o.failed_from or 0, default=self)
        return Outcome(self.judged, worst.failed_from, worst.cause)


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What became of a prefetch."""

    gone: frozenset[bytes] = frozenset()
    """Keys that no tier holds."""
    unreachable: frozenset[bytes] = frozenset()
    """Keys that could not be had now."""
    ranks: int = 1
    """That have spoken."""

    def joined(self, other: "Prefetched") -> "Prefetched":
        return Prefetched(self.gone | other.gone, self.unreachable | other.unreachable, self.ranks + other.ranks)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers → scheduler, each step in which there is something to say."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    anchors: dict[tuple[str, Edge], int] = field(default_factory=dict)
    """Anchors of the edges, by tenant, that learned something."""
    lost: set[bytes] = field(default_factory=set)
    """Keys that this node's tiers hold no more."""
    prefetched: dict[str, "Prefetched"] = field(default_factory=dict)
    counts: dict[int, dict[str, int]] = field(default_factory=dict)
    """By rank, since its start: not every rank has something to say in every step."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        outcomes = dict(self.outcomes)
        for request, outcome in other.outcomes.items():
            outcomes[request] = outcomes[request].joined(outcome) if request in outcomes else outcome
        anchors = dict(self.anchors)
        for edge, count in other.anchors.items():
            anchors[edge] = min(count, anchors.get(edge, count))
        prefetched = dict(self.prefetched)
        for request, part in other.prefetched.items():
            prefetched[request] = prefetched[request].joined(part) if request in prefetched else part
        return WorkerReport(outcomes, anchors, self.lost | other.lost, prefetched, self.counts | other.counts)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Worker → scheduler, once, at start-up."""

    nested: bool
    """Heads and gaps can be computed inside this engine."""
