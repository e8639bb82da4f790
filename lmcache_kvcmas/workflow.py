"""Who reads a context in which order, and what each agent's prompt looks like."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_kvcmas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turn:
    """One agent's turn, and what it leaves for those that follow."""

    agent: str
    heading: str
    """Stands in front of the agent's output."""


def load_workflow(given: str, roles: Mapping[str, str]) -> tuple[Turn, ...]:
    """Turns from a JSON file, ``{"turns": [{"agent": name, "heading": text}, ...]}``, or from "planner,solver,critic".

    Without a heading it is the agent's name with a colon, as in "Planner:". Raises ConfigError.
    """
    if given.endswith(".json"):
        turns = _of_file(Path(given))
    else:
        turns = tuple(Turn(name.strip(), _heading(name.strip())) for name in given.split(","))
    for turn in turns:
        if turn.agent not in roles:
            raise ConfigError(f"--workflow names {turn.agent!r}; it must be one of {', '.join(roles)}")
    if len({turn.agent for turn in turns}) != len(turns):
        raise ConfigError(f"--workflow is {given!r}; each agent has one turn")
    return turns


def agent_prompt(
    tokenizer: Any, role: str, context: str, outputs: Sequence[tuple[Turn, str]], instruction: str
) -> list[int]:
    """Tokens of an agent's prompt: its role as the system message, then the context, what others have said about it
    under their headings, and its instruction. Ends where the agent's answer begins."""
    said = "".join(f"\n\n{turn.heading}\n{text}" for turn, text in outputs)
    messages = [{"role": "system", "content": role}, {"role": "user", "content": context + said + instruction}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _of_file(file: Path) -> tuple[Turn, ...]:
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--workflow {file} cannot be read as JSON: {error}") from error
    turns = data.get("turns") if isinstance(data, dict) else None
    if not isinstance(turns, list) or not turns:
        raise ConfigError(f'{file} must be {{"turns": [{{"agent": name, "heading": text}}, ...]}}')
    return tuple(_turn(turn, file) for turn in turns)


def _turn(data: Any, file: Path) -> Turn:
    agent = data.get("agent") if isinstance(data, dict) else None
    heading = data.get("heading", _heading(agent)) if isinstance(agent, str) else None
    if not isinstance(agent, str) or not isinstance(heading, str):
        raise ConfigError(f'{file} has a turn {data!r}. Allowed: {{"agent": name, "heading": text}}.')
    return Turn(agent, heading)


def _heading(agent: str) -> str:
    return f"{agent[:1].upper()}{agent[1:]}:"
