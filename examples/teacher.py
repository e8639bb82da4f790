"""A vLLM logits processor that makes a request say given tokens, and keeps the logits it would have chosen from.

Comparing two engines token by token needs both to have said the same so far. `prompt_logprobs` would tell as well, but
vLLM then takes no tokens from a connector. Works with the engine in this process, where `Lesson` objects are shared.

    lesson = Lesson(forced=[12, 7])
    llm.generate(prompt, SamplingParams(max_tokens=3, temperature=0, extra_args={"lesson": lesson.name}))
    lesson.logits  # [3, V]: in front of 12, in front of 7, and behind it
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

_lessons: dict[str, "Lesson"] = {}
_numbers = itertools.count()


class Lesson:
    """What one request has to say, and its logits, fp32 on the CPU, raw."""

    def __init__(self, forced: Sequence[int] = ()) -> None:
        self.name = f"lesson-{next(_numbers)}"
        self.forced = list(forced)
        self._rows: dict[int, Tensor] = {}
        _lessons[self.name] = self

    def __call__(self, output: list[int], logits: Tensor) -> Tensor:
        at = len(output)
        # A chunk of a prompt asks as well; what the last one saw stays.
        self._rows[at] = logits.detach().float().cpu().clone()
        if at < len(self.forced):
            logits.fill_(-torch.inf)
            logits[self.forced[at]] = 0
        return logits

    @property
    def logits(self) -> Tensor:
        """``[tokens, V]``."""
        return torch.stack([self._rows[i] for i in sorted(self._rows)])


class Teacher(AdapterLogitsProcessor):
    """Give it to the engine: ``LLM(..., logits_processors=[Teacher], async_scheduling=False)``."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        return _lessons.pop((params.extra_args or {}).get("lesson", ""), None)
