"""What the package's own files hold: teams of eight agents, and contexts for them."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ..frameworks import Agent

_DATA = files("lmcache_kvcmas.evaluate") / "data"


@dataclass(frozen=True, slots=True)
class OwnContext:
    id: str
    use: str
    text: str


@cache
def read_team(name: str) -> tuple[Agent, ...]:
    """``team``: roles of 30 to 142 tokens (SmolLM2's) for tasks with a right answer. ``roles``: 54 to 374 tokens, for
    documents, code and sums, whose last agent writes to a customer. The last agent of both is ``reflector``."""
    data = json.loads((_DATA / f"{name}.json").read_text("utf-8"))
    return tuple(Agent(agent, role, data["instructions"][agent]) for agent, role in data["roles"].items())


@cache
def read_contexts() -> tuple[OwnContext, ...]:
    """Of 154 to 1,442 tokens (SmolLM2's)."""
    lines = (_DATA / "contexts.jsonl").read_text("utf-8").splitlines()
    return tuple(OwnContext(d["id"], d["use"], d["text"]) for d in map(json.loads, lines))
