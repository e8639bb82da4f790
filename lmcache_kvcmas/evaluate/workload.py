"""Roles and contexts, as files give them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Context:
    """A text that all agents read."""

    id: str
    anchor: bool
    """Fills the pool; all others are test contexts."""
    text: str
    kind: str = ""
    """What sort of text it is; contexts of one kind can have pools of their own."""


@dataclass(frozen=True, slots=True)
class Workload:
    roles: dict[str, str]
    """System prompt of each role."""
    instructions: dict[str, str]
    """What follows the context in the user's message, of each role."""
    contexts: tuple[Context, ...]

    @property
    def anchors(self) -> tuple[Context, ...]:
        return tuple(c for c in self.contexts if c.anchor)

    @property
    def tests(self) -> tuple[Context, ...]:
        return tuple(c for c in self.contexts if not c.anchor)


def load_workload(roles: Path, contexts: Path) -> Workload:
    """Read ``roles.json`` (``{"roles": {name: text}, "instructions": {name: text}}``) and ``contexts.jsonl`` (a line a
    context: ``{"id", "use", "text"}``, with a ``"kind"`` if there are several; ``"use": "anchor"`` fills the pool).
    Raises ConfigError naming file and line.
    """
    data = _json(_text(roles), str(roles))
    named = {key: data.get(key) if isinstance(data, dict) else None for key in ("roles", "instructions")}
    for key, value in named.items():
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise ConfigError(f"{roles}: {key!r} must be an object of texts, one a role")
    missing = sorted(set(named["roles"] or ()) - set(named["instructions"] or ()))
    if missing or not named["roles"]:
        raise ConfigError(f"{roles}: every role needs an instruction; missing: {', '.join(missing) or 'all'}")
    lines = [(i, line) for i, line in enumerate(_text(contexts).splitlines(), 1) if line.strip()]
    loaded = tuple(_context(_json(line, f"{contexts}:{i}"), f"{contexts}:{i}") for i, line in lines)
    ids = [c.id for c in loaded]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{contexts}: ids must differ; seen twice: {sorted({i for i in ids if ids.count(i) > 1})}")
    return Workload(dict(named["roles"] or {}), dict(named["instructions"] or {}), loaded)


def _context(data: Any, where: str) -> Context:
    if not isinstance(data, dict) or not all(isinstance(data.get(key), str) for key in ("id", "use", "text")):
        raise ConfigError(f'{where}: a context is {{"id": text, "use": "anchor" or another word, "text": text}}')
    if not data["text"].strip():
        raise ConfigError(f"{where}: context {data['id']!r} has no text")
    return Context(data["id"], data["use"] == "anchor", data["text"], str(data.get("kind", "")))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
