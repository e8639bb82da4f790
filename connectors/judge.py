"""From a load's predictions to what the model computes of it: rows are chosen, then the gate judges the rest.

All tensor-parallel ranks come to the same end, whatever failed on one of them: the collectives of the nested forward
count on it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lmcache_kvcmas.choose import ChosenBefore, choose, stretches
from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors.messages import Judged, Load, Outcome
from lmcache_kvcmas.connectors.nested import Range
from lmcache_kvcmas.edges import Ready
from lmcache_kvcmas.gate import Reliability, decide, ehat_of
from lmcache_kvcmas.spans import Span, SpanKind
from lmcache_kvcmas.takeover import Prediction

MISSING = "missing_entry"


class Group(Protocol):
    """The tensor-parallel ranks, which have different heads of the same tokens."""

    @property
    def world_size(self) -> int: ...
    def all_reduce(self, input_: Tensor) -> Tensor: ...
    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """What one load came to on this rank, before the gate."""

    predictions: list[tuple[Prediction, Ready]]
    """With what each was made from."""
    failed_from: int | None = None
    cause: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What becomes of one load. Alike on all ranks, but for what this one could not fetch (`Outcome.failed_from`)."""

    outcome: Outcome
    chosen: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Start of an accepted span → its rows that the model recomputes, rising."""
    accepted: Sequence[tuple[Prediction, Ready]] = ()


class Judge:
    """Judges loads. ``layers`` and ``device`` are those of `Reliability`."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._before = ChosenBefore()

    def judge(self, load: Load, started: Started, settings: Settings, group: Group) -> Verdict:
        """Choose the rows of predicted spans that the anchors disagree about most; ask the gate about the others."""
        predicted = [s for s in load.spans if s.edge is not None]
        least = settings.min_anchors if settings.predictor_learns else 0
        if predicted and group.world_size > 1:
            started = _agreed(predicted, started, least, self._layers, self._device, group)
        judged: list[Judged] = []
        chosen: dict[int, Sequence[int]] = {}
        accepted: list[tuple[Prediction, Ready]] = []
        for prediction, ready in started.predictions:
            span = prediction.span
            assert span.edge is not None
            tokens = len(load.tokens[load.spans.index(span)])  # 0 if it cannot be computed
            rows = self._chosen(load.tag, span, prediction.reliability, settings, tokens)
            said = decide(
                ehat_of(prediction.reliability.sums(torch.tensor(rows) if rows else None)),
                span.error2,
                theta=settings.theta,
                chain_theta=settings.chain_theta,
                anchors=ready.anchors,
                min_anchors=least,
            )
            yes, reason = said.accepted, said.reason.value
            computed = not yes and 0 < tokens <= settings.max_gap_tokens
            recomputed = len(rows) if yes else 0
            judged.append(
                Judged(span.start, span.end, span.edge, said.ehat, ready.anchors, yes, reason, computed, recomputed)
            )
            if yes:
                self._before.keep(load.tag, span.start, span.end, rows)
                accepted.append((prediction, ready))
                chosen[span.start] = rows
            elif not computed:
                return Verdict(Outcome(tuple(judged), span.start, reason), chosen, accepted)
        return Verdict(Outcome(tuple(judged), started.failed_from, started.cause), chosen, accepted)

    def _chosen(self, tag: bytes, span: Span, reliability: Reliability, settings: Settings, tokens: int) -> list[int]:
        if not (tokens and settings.recompute_fraction):
            return []
        before = self._before.find(tag, span.start, span.end)
        if before is not None:
            return before
        count = settings.recomputed(tokens)
        return choose(reliability.doubts(), count).tolist() if count else []


def ranges_of(load: Load, verdict: Verdict) -> Iterator[Range]:
    """What the model computes of a load, in order of position: heads, gaps, refused spans and chosen rows."""
    judged = {j.start: j for j in verdict.outcome.judged}
    for span, tokens in zip(load.spans, load.tokens, strict=True):
        said = judged.get(span.start)
        if said is not None and not said.accepted and not said.computed:
            return  # vLLM computes from here on
        if span.kind is SpanKind.COMPUTE or (said is not None and said.computed):
            yield Range(tokens, span.start, load.block_ids)
        else:
            for start, end in stretches(verdict.chosen.get(span.start, ())):
                yield Range(tokens[start:end], span.start + start, load.block_ids)


def _agreed(
    spans: Sequence[Span], started: Started, least: int, layers: int, device: torch.device, group: Group
) -> Started:
    """What all ranks together came to.

    Their terms are added up, so that all see the same doubts. Where a rank lacks a prediction, or has fewer than
    ``least`` anchors, all have to know.
    """
    here = started.predictions
    absent = torch.ones(len(spans), device=device)
    absent[: len(here)] = 0
    few = torch.zeros(len(spans), device=device)
    few[: len(here)] = torch.tensor([ready.anchors < least for _, ready in here], dtype=few.dtype)
    terms = [prediction.reliability.terms for prediction, _ in here]
    terms += [Reliability(layers, s.end - s.start, device).terms for s in spans[len(here) :]]
    # A sum may differ in its last bit from rank to rank, and that would be another choice: the first rank's counts.
    total = group.broadcast(group.all_reduce(torch.cat([absent, few, *(t.flatten() for t in terms)])))
    missing, lacking, *sums = torch.split(total, [len(spans), len(spans), *(t.numel() for t in terms)])
    for mine, all_ranks in zip(terms, sums, strict=True):
        mine.copy_(all_ranks.view_as(mine))
    whole = next((i for i, n in enumerate(missing.tolist()) if n > 0), len(spans))
    predictions = [
        (prediction, ready._replace(anchors=0) if n > 0 else ready)
        for (prediction, ready), n in zip(here[:whole], lacking.tolist(), strict=False)
    ]
    if len(here) <= whole:
        return Started(predictions, started.failed_from, started.cause)
    return Started(predictions, spans[whole].start, MISSING)
