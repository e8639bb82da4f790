"""What a warm-up has to do, and what it will take: known before any model runs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from lmcache_kvcmas.codecs import RAW
from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.evaluate.workload import Context, Workload
from lmcache_kvcmas.model import ModelGeometry, model_fingerprint
from lmcache_kvcmas.workflow import Turn, agent_prompt

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Job:
    """One context through all turns."""

    context: Context
    mark: bytes
    """Names everything that decides what it leaves."""
    prompts: tuple[int, ...]
    """Tokens of each turn's prompt, if every agent says all it may."""
    shared: tuple[int, ...]
    """Of those: tokens that stand in the prompt of the turn before, or were said there."""

    @property
    def tokens(self) -> int:
        return sum(self.prompts)


@dataclass(frozen=True, slots=True)
class Estimate:
    bases: int
    """Bytes of full-width chunks."""
    deltas: int
    anchors: int
    seconds: float

    @property
    def total(self) -> int:
        return self.bases + self.deltas + self.anchors


@dataclass(frozen=True, slots=True)
class Team:
    """The agents and how they are run; the same for all contexts."""

    workload: Workload
    turns: tuple[Turn, ...]
    max_tokens: int
    salt: str
    hints: bool

    def prompt(self, tokenizer: Any, turn: Turn, context: Context, outputs: Sequence[tuple[Turn, str]]) -> list[int]:
        roles, instructions = self.workload.roles, self.workload.instructions
        return agent_prompt(tokenizer, roles[turn.agent], context.text, outputs, instructions[turn.agent])

    def mark(self, context: Context, settings: Settings, chunk_size: int) -> bytes:
        """Of a context: another text, role, order, length or setting that stores something else is another mark."""
        roles, instructions = self.workload.roles, self.workload.instructions
        parts = [
            context.text,
            [[t.agent, t.heading, roles[t.agent], instructions[t.agent]] for t in self.turns],
            [self.max_tokens, self.salt, self.hints, settings.salt, chunk_size],
            [settings.rank, settings.base_codec, settings.max_anchors, settings.anchor_tokens],
        ]
        return blake3(json.dumps(parts).encode()).hexdigest().encode()


def cache_dtype(model: Path, given: str) -> str:
    """``given``, or with "auto" what the model's config says. Raises ConfigError."""
    config = read_config(model)
    text = config.get("text_config")
    parts = [config, *([text] if isinstance(text, dict) else [])]
    named = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), None)
    dtype = str(named) if given == "auto" else given
    if dtype not in DTYPES:
        said = f"the model's config says {named}" if given == "auto" else f"--dtype is {given!r}"
        raise ConfigError(f"{said}. Allowed: --dtype {', '.join(DTYPES)}; that of the server.")
    return dtype


def geometry_of(model: Path, dtype: str) -> ModelGeometry:
    """As the engine will see it. Raises ConfigError or UnsupportedModelError."""
    return ModelGeometry.of(read_config(model), dtype=dtype, fingerprint=model_fingerprint(model))


def read_config(model: Path) -> dict[str, Any]:
    try:
        config = json.loads((model / "config.json").read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--model {model}: its config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {model}: its config.json is no object")
    return config


def jobs_of(
    team: Team, tokenizer: Any, contexts: Sequence[Context], settings: Settings, chunk_size: int
) -> Iterator[Job]:
    """One a context, in order."""
    for context in contexts:
        prompts: list[int] = []
        shared: list[int] = []
        outputs: list[tuple[Turn, str]] = []
        for place, turn in enumerate(team.turns):
            prompt = team.prompt(tokenizer, turn, context, outputs)
            prompts.append(len(prompt) + place * team.max_tokens)
            outputs.append((turn, ""))
            own = len(team.prompt(tokenizer, turn, Context("", False, ""), ())) if place else prompts[0]
            shared.append(max(0, prompts[-1] - own))
        yield Job(context, team.mark(context, settings, chunk_size), tuple(prompts), tuple(shared))


def estimate(
    jobs: Sequence[Job], team: Team, geometry: ModelGeometry, settings: Settings, tokens_per_second: float
) -> Estimate:
    """Bytes of entries' tensors, as if nothing of it were there yet: role prompts that several contexts share, and what
    Redis needs for itself, are not taken into account."""
    wide = geometry.bytes_per_token if settings.base_codec == RAW else _coded(geometry)
    bases = deltas = 0
    for job in jobs:
        for prompt, shared in zip(job.prompts, job.shared, strict=True):
            run = max(0, shared - settings.head_tokens) if shared > settings.min_run_tokens else 0
            bases += wide * (prompt + team.max_tokens - run)
            deltas += 2 * _factors(geometry, run, settings.rank, geometry.torch_dtype.itemsize)
    edges = len(team.turns) - 1
    kept = min(len(jobs), settings.max_anchors)
    longest = max((shared for job in jobs for shared in job.shared), default=0)
    rows = min(longest, settings.anchor_tokens)
    anchor = 4 * _factors(geometry, rows, settings.rank, 2) + (8 * geometry.layers + 4) * rows
    generated = len(jobs) * len(team.turns) * team.max_tokens
    seconds = (sum(job.tokens for job in jobs) + generated) / tokens_per_second
    return Estimate(bases, deltas, edges * kept * anchor if rows else 0, seconds)


def _coded(geometry: ModelGeometry) -> int:
    """Bytes of a token in 8-bit codes, with a scale for each head."""
    return 2 * geometry.layers * (geometry.channels + 4 * geometry.kv_heads)


def _factors(geometry: ModelGeometry, tokens: int, rank: int, itemsize: int) -> int:
    """Bytes of one stack ``[L, tokens, C]`` as rank-``rank`` factors, or whole where that is smaller."""
    c = geometry.channels
    return itemsize * geometry.layers * min(rank * (tokens + c), tokens * c)
