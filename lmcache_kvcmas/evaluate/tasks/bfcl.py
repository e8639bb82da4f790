"""Multi-turn agent tasks of the Berkeley Function-Calling Leaderboard v4 (``bfcl-eval`` 2026.3.23, Apache-2.0).

The agents read the documentation of some tools and what a user asked for, request by request; the last agent names the
tool that one request needs. Requests are taken whose solution is a single call. Nothing is executed, and nothing is
judged: SmolLM2-135M (Q4_1) names the tool of the data set's own solution in 0 of 8 requests among six tools and in 2 of
12 among three, asked at once and without the others' notes: no more than chance. Only the package's data files are
read.
"""

import ast
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..frameworks import Task
from .packages import folder, read_lines
from .splits import USES, Counts, take
from .teams import read_team

TOOLS = 6
"""Tools that are documented in one context, where the conversation has so many."""
_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str
    requests: tuple[str, ...]
    tools: dict[str, str]
    """Name and documentation of every tool the conversation may use."""
    needed: dict[int, str]
    """The one tool that a request needs, of requests that need one."""


def bfcl(name: str, counts: Counts, seed: int) -> Sequence[Task]:
    conversations = list(_conversations(folder("bfcl_eval", name) / "data", name))
    random.Random(f"{seed}/{name}").shuffle(conversations)
    return [
        _task(name, use, conversation, random.Random(f"{seed}/{name}/{conversation.id}"))
        for use in USES
        for conversation in take(name, conversations, lambda c: c.requests[0], use, counts.of(use))
    ]


@cache
def _conversations(data: Path, name: str) -> tuple[Conversation, ...]:
    """All with two requests or more that need one tool each, and different ones."""
    documents = {
        kind: {
            tool["name"]: _document(tool) for tool in read_lines(data / "multi_turn_func_doc" / f"{file}.json", name)
        }
        for kind, file in _FILES.items()
    }
    solutions = {d["id"]: d["ground_truth"] for d in read_lines(data / "possible_answer" / _MAIN, name)}
    found = []
    for entry in read_lines(data / _MAIN, name):
        tools = {tool: text for kind in entry["involved_classes"] for tool, text in documents[kind].items()}
        tools = {tool: text for tool, text in tools.items() if tool not in entry.get("excluded_function", ())}
        calls = {i: _called(turn[0]) for i, turn in enumerate(solutions[entry["id"]]) if len(turn) == 1}
        needed = {i: tool for i, tool in calls.items() if tool in tools}
        requests = tuple(" ".join(turn[0]["content"].split()) for turn in entry["question"])
        if len(set(needed.values())) >= 2:
            found.append(Conversation(entry["id"], requests, tools, needed))
    return tuple(found)


_MAIN = "BFCL_v4_multi_turn_base.json"


def _document(tool: dict[str, Any]) -> str:
    """``name(parameters): what it does``, without the sentence that says which system the tool belongs to."""
    described = tool["description"].split("Tool description: ")[-1].split(". ")[0].strip().rstrip(".")
    return f"{tool['name']}({', '.join(tool['parameters']['properties'])}): {described}."


def _called(call: str) -> str:
    expression = ast.parse(call, mode="eval").body
    return expression.func.id if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name) else ""


def _task(name: str, use: str, conversation: Conversation, rng: random.Random) -> Task:
    """The last such request is asked about; one with another tool is the example."""
    asked = max(conversation.needed)
    expected = conversation.needed[asked]
    example = next(i for i, tool in conversation.needed.items() if tool != expected)
    shown = {expected, conversation.needed[example]}
    others = sorted(set(conversation.tools) - shown)
    shown |= set(rng.sample(others, min(TOOLS - len(shown), len(others))))
    names = rng.sample(sorted(shown), len(shown))
    context = "Tools:\n" + "\n".join(f"- {conversation.tools[tool]}" for tool in names)
    context += "\n\nThe user's requests:\n" + "\n".join(f"{i}. {r}" for i, r in enumerate(conversation.requests, 1))

    def question(i: int) -> str:
        return f"Request {i + 1}: {conversation.requests[i]} Which tool do you call?"

    return Task(
        id=f"{name}-{use}-{conversation.id.rsplit('_', 1)[-1]}",
        workload=name,
        use=use,
        context=context,
        team=read_team("team"),
        question=question(asked),
        examples=((question(example), f"I call {conversation.needed[example]}."),),
        answer_tokens=12,
    )
