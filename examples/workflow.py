"""The demo's agents: four roles that read the same growing context, each with its own prompt in front."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_kvcmas.workflow import Turn, agent_prompt

WORKLOAD = Path(__file__).parent / "workload"


TURNS = (
    Turn("planner", "Plan:"),
    Turn("solver", "Solution:"),
    Turn("critic", "Review:"),
    Turn("reflector", "Reply:"),
)


@dataclass(frozen=True)
class Roles:
    """System prompts and instructions by agent."""

    roles: dict[str, str]
    instructions: dict[str, str]

    @classmethod
    def read(cls, file: Path = WORKLOAD / "roles.json") -> "Roles":
        return cls(**json.loads(file.read_text("utf-8")))

    def prompt(self, tokenizer: Any, agent: str, context: str, outputs: Sequence[tuple[Turn, str]] = ()) -> list[int]:
        """Tokens of an agent's prompt: its role, the context and what others have said about it, its instruction."""
        return agent_prompt(tokenizer, self.roles[agent], context, outputs, self.instructions[agent])

    def around(self, tokenizer: Any, agent: str) -> tuple[list[int], list[int]]:
        """Tokens in front of and behind the context in an agent's prompt, for contexts given in tokens."""
        mark = "\u2042"
        messages = [
            {"role": "system", "content": self.roles[agent]},
            {"role": "user", "content": mark + self.instructions[agent]},
        ]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        front, back = text.split(mark)
        return tuple(tokenizer.encode(part, add_special_tokens=False) for part in (front, back))


def contexts(use: str, file: Path = WORKLOAD / "contexts.jsonl") -> Iterator[tuple[str, str]]:
    """(id, text) of the contexts for one use: ``anchor`` (to learn from) or ``dev`` (to test on)."""
    for line in file.read_text("utf-8").splitlines():
        context = json.loads(line)
        if context["use"] == use:
            yield context["id"], context["text"]
