"""`kvcmas warmup`: agents run over contexts before users do, so that the shared tier is full when servers start."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lmcache_kvcmas.connectors.commands.catalogue import Warm, warm_name
from lmcache_kvcmas.connectors.commands.opened import Opened, open_redis
from lmcache_kvcmas.connectors.commands.shown import age, plain_table, size
from lmcache_kvcmas.connectors.commands.warm_engine import WarmEngine, warm_engine
from lmcache_kvcmas.connectors.commands.warm_plan import (
    Job,
    Team,
    cache_dtype,
    estimate,
    geometry_of,
    jobs_of,
    read_config,
)
from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_names import Names, model_mark
from lmcache_kvcmas.entries import EntryKind, Owner
from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.evaluate.workload import load_workload
from lmcache_kvcmas.keys import KeySpace
from lmcache_kvcmas.model import ModelGeometry
from lmcache_kvcmas.records import record_content
from lmcache_kvcmas.tenants import tenant_mark, tenant_name
from lmcache_kvcmas.workflow import Turn, load_workflow

_SETTLE_SECONDS = 300.0
_WARM = msgspec.msgpack.Decoder(Warm)


@dataclass(frozen=True, slots=True)
class WarmupOptions:
    model: Path
    roles: Path
    contexts: Path
    workflow: str
    limit: int | None = None
    max_tokens: int = 32
    dtype: str = "auto"
    salt: str = ""
    """The requests' ``cache_salt``."""
    hints: bool = False
    """Name the agents as the roles file does; for clients that do so as well."""
    tokens_per_second: float = 250.0
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Where marks and records of one model and tenant are."""

    names: Names
    tenant: str
    """Its name, not its mark."""

    @property
    def hash(self) -> str:
        return warm_name(self.names.prefix, model_mark(self.names.owner.model))

    def records(self, keys: Sequence[bytes]) -> list[str]:
        return [self.names.entry(EntryKind.RECORD, key) for key in keys]


def run_warmup(file: Path | None, options: WarmupOptions) -> bool:
    """True if all contexts are warm. Raises ConfigError, UnsupportedModelError or RedisUnavailable."""
    console = Console()
    workload = load_workload(options.roles, options.contexts)
    turns = load_workflow(options.workflow, workload.roles)
    team = Team(workload, turns, options.max_tokens, options.salt, options.hints)
    dtype = cache_dtype(options.model, options.dtype)
    geometry = geometry_of(options.model, dtype)
    with open_redis(file) as opened:
        opened.client.ping()
        settings = opened.config.settings
        contexts = workload.contexts[: options.limit]
        tokenizer = _tokenizer(options.model)
        jobs = list(jobs_of(team, tokenizer, contexts, settings, opened.config.chunk_size))
        _check_lengths(jobs, team, options.model)
        place = _place(opened, geometry.fingerprint, options.salt)
        todo = _undone(opened.client, place, jobs)
        console.print(f"{len(jobs) - len(todo)} of {len(jobs)} contexts are there already, {len(todo)} to do")
        if not todo:
            return True
        _show_estimate(todo, team, geometry, opened, options, console)
        if options.dry_run:
            return True
        length = max(max(job.prompts) for job in todo) + options.max_tokens + 16
        with ExitStack() as running:
            with console.status("starting vLLM (10 to 60 s) …"):
                engine = running.enter_context(warm_engine(options.model, file, dtype, length))
            if engine.fingerprint != geometry.fingerprint:
                # The engine read the model's config in another way than we did: what it says counts.
                place = _place(opened, engine.fingerprint, options.salt)
                todo = _undone(opened.client, place, todo)
            return _run(engine, opened.client, place, todo, team, console)


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    if not tokenizer.chat_template:
        raise ConfigError(f"--model {model}: its tokenizer has no chat template")
    return tokenizer


def _check_lengths(jobs: Sequence[Job], team: Team, model: Path) -> None:
    most = read_config(model).get("max_position_embeddings")
    for job in jobs:
        longest = max(job.prompts) + team.max_tokens
        if isinstance(most, int) and longest > most:
            raise ConfigError(
                f"context {job.context.id!r} makes a prompt of {longest} tokens with what is said. "
                f"Allowed for this model: {most}; shorten it, or lower --max-tokens."
            )


def _place(opened: Opened, fingerprint: str, salt: str) -> _Place:
    settings = opened.config.settings
    names = Names(opened.settings.prefix, Owner(fingerprint), settings.salt)
    return _Place(names, tenant_name(settings.salt, salt))


def _undone(client: RedisClient, place: _Place, jobs: Sequence[Job]) -> list[Job]:
    """Jobs that have no mark, or whose records are not all there any more."""
    marks: dict[bytes, Warm] = {}
    for field, value in client.hash_all(place.hash).items():
        try:
            marks[field] = _WARM.decode(value)
        except msgspec.MsgspecError:
            continue
    there: dict[bytes, bool] = {}
    for job in jobs:
        mark = marks.get(job.mark)
        if mark is not None:
            there[job.mark] = all(client.exists_many(place.records(mark.records)))
    return [job for job in jobs if not there.get(job.mark)]


def _show_estimate(
    todo: Sequence[Job], team: Team, geometry: ModelGeometry, opened: Opened, options: WarmupOptions, console: Console
) -> None:
    settings = opened.config.settings
    about = estimate(todo, team, geometry, settings, options.tokens_per_second)
    table = plain_table("about", "", "", left=2)
    table.show_header = False
    tokens = sum(job.tokens for job in todo)
    table.add_row("prompts", f"{len(todo) * len(team.turns)} of {tokens} tokens in all")
    table.add_row("in Redis", f"{size(about.total)}, if nothing of it is there yet")
    table.add_row("  bases", f"{size(about.bases)} at full width ({settings.base_codec})")
    table.add_row("  deltas", f"{size(about.deltas)} at rank {settings.rank}")
    table.add_row("  anchors", size(about.anchors))
    table.add_row(
        "time",
        f"{age(about.seconds)} at {options.tokens_per_second:g} tokens/s (--tokens-per-second; the default was "
        "measured with SmolLM2-135M in fp32 on two CPU cores)",
    )
    console.print(table)


def _run(
    engine: WarmEngine, client: RedisClient, place: _Place, todo: Sequence[Job], team: Team, console: Console
) -> bool:
    failed: list[str] = []
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("contexts, {task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=len(todo), tokens=0)
        tokens = 0
        for job in todo:
            bar.update(task, description=job.context.id)
            keys, prompted, settled = _warm(engine, job, team, place.tenant)
            tokens += prompted
            if settled and all(client.exists_many(place.records(keys))):
                mark = Warm(tenant_mark(engine.fingerprint, place.tenant), keys, time.time())
                client.hash_set(place.hash, job.mark, msgspec.msgpack.encode(mark))
            else:
                failed.append(job.context.id)
            bar.update(task, advance=1, tokens=tokens)
    console.print(f"{len(todo) - len(failed)} contexts warmed, {tokens} tokens prefilled")
    if failed:
        console.print(
            f"{len(failed)} not written whole, and tried again by the next run: {', '.join(failed[:10])}. "
            "Is Redis full, or max_inflight_bytes or max_local_cpu_size too small for a context?",
            style="red",
        )
    return not failed


def _warm(engine: WarmEngine, job: Job, team: Team, tenant: str) -> tuple[list[bytes], int, bool]:
    """One context through all turns: keys of the records that it left, tokens prefilled, and whether all is written.

    Densely: what is stored is exact, and every turn is a lesson.
    """
    space = KeySpace(engine.fingerprint, tenant)
    lost = engine.lost_writes
    keys: list[bytes] = []
    outputs: list[tuple[Turn, str]] = []
    prompted = 0
    settled = True
    for turn in team.turns:
        prompt = team.prompt(engine.tokenizer, turn, job.context, outputs)
        hints: dict[str, Any] = {"share": False} | ({"agent": turn.agent} if team.hints else {})
        said = engine.ask(prompt, team.max_tokens, hints, team.salt)
        settled = engine.settle(_SETTLE_SECONDS) and settled
        tokens = np.array([*prompt, *said.tokens][:-1], np.int32)  # all that have a cache: the last one has none
        keys.append(space.record(record_content(tokens, said.agent)))
        outputs.append((turn, said.text))
        prompted += len(prompt)
    return keys, prompted, settled and engine.lost_writes == lost
