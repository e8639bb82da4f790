"""What the scheduler's half knows of a request from its arrival to its end, and what it says of it then."""

from dataclasses import dataclass, field, replace
from typing import Any

from lmcache_kvcmas.connectors.messages import Outcome
from lmcache_kvcmas.connectors.neighbours import Waiting
from lmcache_kvcmas.fingerprint import Tokens
from lmcache_kvcmas.hints import Hints
from lmcache_kvcmas.plans import LabelledPlan
from lmcache_kvcmas.report import PLANNED, HopReport, hop_report
from lmcache_kvcmas.spans import SpanKind


@dataclass
class KnownRequest:
    """Mutable: vLLM asks, loads, preempts and asks again."""

    tokens: Tokens
    tenant: str
    hints: Hints
    planned: LabelledPlan
    """As it was when the request arrived."""
    offered: LabelledPlan
    """What vLLM is offered: loses its approximate spans once they could not be given."""
    used: LabelledPlan
    """What the request's cache really consists of."""
    tag: bytes
    local: int = 0
    """Tokens that vLLM had itself when it last asked."""
    loading: bool = False
    """A load is under way whose outcome the workers have not reported."""
    to_choose: int = 0
    """Tokens of predicted spans that the latest load recomputes if the gate accepts all."""
    waiting: Waiting | None = None
    """Entries are on their way from the shared tier."""
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def approximate(self) -> bool:
        return self.used.first_approximate is not None


def not_eligible(request: Any) -> str | None:
    """Why a request is left to vLLM alone, or None."""
    if not request.prompt_token_ids:
        return "no_tokens"
    if getattr(request, "mm_features", None):
        return "multimodal"
    if getattr(request, "lora_request", None) is not None:
        return "lora"
    if getattr(request, "resumable", False):
        return "streaming_input"
    params = request.sampling_params
    if params is None:
        return "pooling"
    if params.prompt_logprobs is not None:
        return "prompt_logprobs"
    return None


def report_of(known: KnownRequest) -> HopReport:
    """What became of the request; what was planned for it, if it finished in the very step of its load.

    The load's outcome comes after the response then. A load that had failed would have kept the request from finishing,
    but the gate may have had some spans computed instead.
    """
    used, outcome = known.offered if known.loading else known.used, known.outcome
    # What vLLM had from an earlier request counts as reused, whatever that one recomputed.
    chosen = sum(j.recomputed for j in outcome.judged if j.end <= used.covered)
    if known.loading:
        chosen = known.to_choose
    report = hop_report(known.planned, used, outcome.judged, len(known.tokens), outcome.cause, chosen)
    unjudged = known.loading and any(s.kind is SpanKind.PREDICTED for s in used.spans)
    return replace(report, decision=PLANNED) if unjudged else report
