"""A transcript served by every method: each agent takes over the cache that the one before it really had."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from typing import Any

import torch

from ..spans import Edge, Span, SpanKind
from .cases import Case, Examples, Outcome, rotated
from .dense import Active, DenseModel
from .measures import AnswerErrors, answer_errors
from .methods import Method
from .transcripts import Step, Transcript

_BATCH = 9  # caches of one length that the model runs over at a time


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One method on one call that took something over."""

    workload: str
    trace: str
    seed: int
    hop: int
    """How many calls of the trace, this one included, took something over."""
    edge: str
    """``source:destination`` of the first run."""
    method: str
    shared: int
    """Tokens that were there to be taken over."""
    kl: float
    top1: float
    exact: bool
    ehat: float | None
    """The largest of the call's runs."""
    recompute: float
    """Recomputed tokens x layers ÷ those of what was shared."""
    reuse: float
    """Shared tokens that were neither recomputed nor refused ÷ all shared ones."""
    state_bytes: int
    reference_prefills: int
    accepted: float
    """Share of the runs that the method's gate let pass."""
    score: float | None
    """Of the trace's last answer, on its last call."""
    seconds: float
    """In the method itself; forwards over what no method takes over are not counted."""


@dataclass(slots=True)
class _Held:
    """What one method has of a trace so far, call by call."""

    caches: list[Active] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)
    error2: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Call:
    """What one method makes of one call."""

    active: Active
    exact: bool = True
    outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    """Tokens of each run, and what became of it."""
    own: int = 0
    error2: float = 0.0
    seconds: float = 0.0


def examples_of(
    model: DenseModel, transcripts: Sequence[Transcript], rank: int = 32, most: int = 10
) -> dict[Edge, Examples]:
    """What dense transcripts teach each edge, at most ``most`` transitions, the first ones."""
    cases: dict[Edge, list[Case]] = {}
    for transcript in transcripts:
        server, caches = TraceServer(model, transcript), [s.cache for s in transcript.steps]
        for step in transcript.steps:
            for span in step.predicted:
                assert span.edge is not None
                some = cases.setdefault(span.edge, [])
                if len(some) < most:
                    some.append(server.case(step, span, caches, step.cache.rows(0, span.start)))
    return {edge: Examples(tuple(some), rank) for edge, some in cases.items()}


class TraceServer:
    """Serves one transcript by several methods, all of them over dense prefill's own answers."""

    def __init__(
        self,
        model: DenseModel,
        transcript: Transcript,
        methods: Sequence[Method] = (),
        learned: Mapping[Edge, Sequence[Method]] | None = None,
    ) -> None:
        self._model, self._transcript, self._methods = model, transcript, methods
        self._learned = learned or {}
        self._untaught = tuple(m.learned(Examples(())) for m in methods)
        self._alone = cache(lambda tokens: model.release(model.extend(None, tokens)[0], 0))

    def rows(self) -> list[TraceRow]:
        """Of all methods, for every call that took something over."""
        held = [_Held() for _ in self._methods]
        rows: list[TraceRow] = []
        for step in self._transcript.steps:
            calls = [_Call(step.cache.rows(0, step.exact)) for _ in self._methods]
            self._cover(step, calls, held)
            # The last prompt token is never covered, so there is something to compute.
            forced = [*step.prompt[step.cover :], *step.answer.tokens[:-1]]
            logps = self._extend(calls, forced, len(step.answer.tokens))
            for h, call in zip(held, calls, strict=True):
                h.caches.append(call.active)
                h.exact.append(call.exact)
                h.error2.append(call.error2)
            if step.cover > step.exact:
                hop = 1 + len({row.hop for row in rows})
                rows += self._judged(step, hop, calls, [answer_errors(logp, step.answer.logp) for logp in logps])
        return rows

    def case(self, step: Step, span: Span, caches: Sequence[Active], front: Active, error2: float = 0.0) -> Case:
        """The transition that ``span`` is, from the sources' ``caches`` (by step) to what stands in front of it."""
        number, row = self._transcript.source(span)
        tokens = step.prompt[span.start : span.end]
        before = [s for s in step.spans if s.end == span.start]
        model = self._model
        return Case(
            model=model,
            source=model.release(caches[number].rows(row, row + len(tokens)), row),
            prefix=front,
            run=tokens,
            suffix=step.prompt[span.end :],
            dense_of=lambda: step.cache.rows(span.start, span.end),
            head_of=cache(lambda n: model.extend(front, tokens[:n])[0]),
            alone_of=lambda: self._alone(tuple(tokens)),
            answer_of=lambda: step.answer,
            fallback_of=cache(lambda: model.extend(front, tokens)[0]),
            begins=not before or before[0].kind is SpanKind.COMPUTE,
            error2=error2,
            offset=span.offset,
            source_prefix=caches[number].rows(0, row) if row else None,
        )

    def _cover(self, step: Step, calls: Sequence[_Call], held: Sequence[_Held]) -> None:
        for span in (s for s in step.spans if s.end > step.exact):
            if span.kind is SpanKind.COMPUTE:
                self._extend(calls, step.prompt[span.start : span.end])
                continue
            methods = self._untaught if span.edge is None else self._learned.get(span.edge, self._untaught)
            for call, h, method in zip(calls, held, methods, strict=True):
                self._take_over(step, span, call, h, method)

    def _extend(self, calls: Sequence[_Call], tokens: list[int], keep: int = 1) -> torch.Tensor:
        """Compute ``tokens`` on top of every call's cache; log-probabilities ``[methods, keep, V]`` of the last."""
        logps = []
        for i in range(0, len(calls), _BATCH):
            some = calls[i : i + _BATCH]
            grown, logp = self._model.grow([c.active for c in some], tokens, keep)
            for call, active in zip(some, grown, strict=True):
                call.active = active
            logps.append(logp)
        return torch.cat(logps)

    def _take_over(self, step: Step, span: Span, call: _Call, held: _Held, method: Method) -> None:
        number, _ = self._transcript.source(span)
        tokens, error2 = span.end - span.start, held.error2[number]
        begun = perf_counter()
        case = self.case(step, span, held.caches, call.active, error2)
        if span.kind is SpanKind.OWN:
            # The agent's own cache of these tokens: there is nothing to correct.
            run, exact = rotated(case), held.exact[number]
            call.own += tokens
        else:
            outcome = method.apply(case)
            run, exact = outcome.run, outcome.recompute == 1
            error2 = 0.0 if exact else error2 + (outcome.ehat or 0.0) ** 2
            call.outcomes.append((tokens, outcome))
        call.active = call.active.then(run)
        call.exact = call.exact and exact
        call.error2 = max(call.error2, error2)
        call.seconds += perf_counter() - begun

    def _judged(
        self, step: Step, hop: int, calls: Sequence[_Call], errors: Sequence[AnswerErrors]
    ) -> Iterator[TraceRow]:
        transcript = self._transcript
        edges = [f"{s.edge.source}:{s.edge.destination}" for s in step.predicted if s.edge is not None]
        scores: Sequence[float | None] = [None] * len(calls)
        if step is transcript.steps[-1] and transcript.trace.judge is not None:
            scores = self._scores(step, calls, errors, transcript.trace.judge)
        for method, call, said, score in zip(self._methods, calls, errors, scores, strict=True):
            yield TraceRow(
                workload=transcript.trace.workload,
                trace=transcript.trace.id,
                seed=transcript.seed,
                hop=hop,
                edge=edges[0] if edges else f"{step.agent}:{step.agent}",
                method=method.name,
                kl=said.kl,
                top1=said.top1,
                exact=said.exact,
                score=score,
                **_costs(call),
            )

    def _scores(
        self, step: Step, calls: Sequence[_Call], errors: Sequence[AnswerErrors], judge: Callable[[str], float]
    ) -> list[float]:
        """Each method's own last answer, judged. Who agrees with dense at every token has said the same."""
        score = cache(judge)
        noise = step.noise
        differ = [
            i
            for i, (c, e) in enumerate(zip(calls, errors, strict=True))
            if not (c.exact or (e.exact and noise is None))
        ]
        said = dict.fromkeys(range(len(calls)), step.text)
        last = len(step.prompt) - 1
        for i in range(0, len(differ), _BATCH):
            some = differ[i : i + _BATCH]
            pasts = [calls[j].active.rows(0, last) for j in some]
            answers = self._model.generate(pasts, step.prompt[last:], step.most, noise)
            said |= {j: self._model.text(a.tokens) for j, a in zip(some, answers, strict=True)}
        return [score(said[i]) for i in range(len(calls))]


def _costs(call: _Call) -> dict[str, Any]:
    """Of a row, what it cost."""
    outcomes = [o for _, o in call.outcomes]
    shared = call.own + sum(n for n, _ in call.outcomes)
    spent = sum(n * o.recompute for n, o in call.outcomes) / shared
    judged = [o.ehat for o in outcomes if o.ehat is not None]
    return {
        "shared": shared,
        "ehat": max(judged, default=None),
        "recompute": spent,
        "reuse": 1 - spent,
        "state_bytes": sum(o.state_bytes for o in outcomes),
        "reference_prefills": max((o.reference_prefills for o in outcomes), default=0),
        "accepted": sum(o.accepted for o in outcomes) / len(outcomes) if outcomes else 1.0,
        "seconds": call.seconds,
    }
