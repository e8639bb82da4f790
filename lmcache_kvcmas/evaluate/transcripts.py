"""A trace as dense prefill serves it, and what the product's planner would have taken over in each of its calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3

from ..agents import AgentRegistry
from ..hints import Hints
from ..index import RecordIndex
from ..planner import Planner
from ..plans import APPROXIMATE, LabelledPlan
from ..records import GENERATED, Record, Segment
from ..spans import Edge, Piece, Span, SpanKind
from .dense import Active, Answer, DenseModel
from .traces import Call, Trace


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call: what was asked and said, and how its prompt is covered."""

    prompt: list[int]
    answer: Answer
    text: str
    agent: str
    spans: tuple[Span, ...]
    """From position 0 on, without holes; what they do not cover is always computed. A piece's chunk names the step that
    it is taken from (`Transcript.source`), its row the position there. PREDICTED spans begin with the run: whether a
    head is computed is a method's business."""
    cache: Active
    """Dense, of the prompt and of the answer but for its last token."""
    most: int
    """Tokens that an answer may have."""
    noise: torch.Tensor | None
    """What the answer was sampled with, `DenseModel.generate`."""

    @property
    def tokens(self) -> list[int]:
        """All that have a cache."""
        return [*self.prompt, *self.answer.tokens[:-1]]

    @property
    def cover(self) -> int:
        return self.spans[-1].end if self.spans else 0

    @property
    def exact(self) -> int:
        """Where the first span begins that is not what dense prefill gives; with none, where the cover ends."""
        return next((s.start for s in self.spans if s.kind in APPROXIMATE), self.cover)

    @property
    def predicted(self) -> tuple[Span, ...]:
        return tuple(s for s in self.spans if s.kind is SpanKind.PREDICTED)


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    trace: Trace
    steps: tuple[Step, ...]
    seed: int = 0

    @staticmethod
    def source(span: Span) -> tuple[int, int]:
        """Index of the step, and position in it, where the cache of a span that takes something over begins."""
        return int.from_bytes(span.pieces[0].chunk, "big"), span.pieces[0].row


class Transcriber:
    """Serves traces densely. Agents keep their names from trace to trace."""

    def __init__(self, model: DenseModel, min_run: int = 64) -> None:
        self.model = model
        self._planner = Planner(min_run=min_run, head=0, max_gap=1 << 30, predictor_learns=False)
        self._registry = AgentRegistry()

    def transcript(self, trace: Trace, temperature: float = 0.0, seed: int = 0) -> Transcript:
        """All calls in order, each answer going into the prompts of those that follow. Greedy at temperature 0."""
        index = RecordIndex()
        steps: list[Step] = []
        for number, call in enumerate(trace.calls):
            prompt = self.model.chat(_messages(call, [s.text for s in steps]))
            noise = gumbel(self.model, call.max_tokens, temperature, f"{seed} {trace.id} {number}")
            cache, answer = self._serve(prompt, call, noise)
            plan = self._plan(prompt, call, index)
            text = call.answer if call.answer is not None else self.model.text(answer.tokens)
            step = Step(prompt, answer, text, plan.agent or call.agent or "", plan.spans, cache, call.max_tokens, noise)
            steps.append(step)
            index.add(_record(step, plan, number))
        return Transcript(trace, tuple(steps), seed)

    def _serve(self, prompt: list[int], call: Call, noise: torch.Tensor | None) -> tuple[Active, Answer]:
        front, _ = self.model.extend(None, prompt[:-1])
        if call.answer is not None:
            said = self.model.tokenizer.encode(call.answer, add_special_tokens=False)[: call.max_tokens] or [prompt[-1]]
            (cache,), logp = self.model.grow([front], [prompt[-1], *said[:-1]], len(said))
            return cache, Answer(said, logp[0])
        (answer,) = self.model.generate([front], prompt[-1:], call.max_tokens, noise)
        (cache,), _ = self.model.grow([front], [prompt[-1], *answer.tokens[:-1]], 1)
        return cache, answer

    def _plan(self, prompt: list[int], call: Call, index: RecordIndex) -> LabelledPlan:
        tokens = np.array(prompt, np.int32)
        hints = Hints(agent=call.agent)
        return self._planner.plan(tokens, index.match(tokens), hints, self._registry, _none)


def gumbel(model: DenseModel, steps: int, temperature: float, seed: str) -> torch.Tensor | None:
    """Noise ``[steps, V]`` that makes `DenseModel.generate` sample at a temperature; None at 0."""
    if temperature == 0:
        return None
    generator = torch.Generator().manual_seed(int.from_bytes(blake3(seed.encode()).digest(length=7), "big"))
    uniform = torch.rand(steps, int(model.model.config.vocab_size), generator=generator).clamp_(1e-9, 1 - 1e-9)
    return -torch.log(-torch.log(uniform)) * temperature


def _none(edge: Edge) -> int:
    return 0


def _messages(call: Call, said: Sequence[str]) -> list[Mapping[str, str]]:
    def text(parts: Sequence[str | int]) -> str:
        return "".join(said[p] if isinstance(p, int) else p for p in parts)

    return [{"role": m.role, "content": text(m.parts)} for m in call.messages]


def _record(step: Step, plan: LabelledPlan, number: int) -> Record:
    """What the call leaves: exact up to the first approximate span, as an engine that took it over would have it."""
    chunk, n = number.to_bytes(2, "big"), len(step.tokens)
    exact = plan.first_approximate
    exact = n if exact is None else exact
    pieces = [Piece(0, exact, chunk, 0), Piece(exact, n, chunk, exact, exact=False)]
    segments = (*plan.segments, *([Segment(len(step.prompt), n, GENERATED)] if n > len(step.prompt) else []))
    return Record(
        id=chunk,
        tokens=np.array(step.tokens, np.int32),
        prompt_tokens=len(step.prompt),
        pieces=tuple(p for p in pieces if p.end > p.start),
        segments=segments,
        agent=plan.agent,
        sequence=number,
    )
