"""The `kvcmas` command. Heavy modules are imported by the command that needs them, so that `--help` is quick.

Exit codes: 0 all is well, 1 something was found, refused or not reachable, 2 the options or the file are wrong.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from lmcache_kvcmas.errors import KVCMASError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="KV caches that agents take over from one another: measure the method, look after the shared tier, fill it.",
    epilog="Exit codes: 0 all is well; 1 something was found, refused or not reachable; 2 wrong options or settings.",
)

Config = Annotated[
    Path | None, typer.Option("--config", help="LMCache file; default: the one that LMCACHE_CONFIG_FILE names")
]
_TASKS = ("contexts", "reasoning", "multihop", "singlehop", "bfcl", "humaneval", "long")
_KINDS = ("record", "base", "delta", "anchor", "pool")


@app.command(
    epilog="Examples: kvcmas evaluate --model DIR --roles roles.json --contexts contexts.jsonl --edge solver:critic; "
    "kvcmas evaluate --model DIR --tasks multihop,reasoning --methods all --json out.json; "
    "kvcmas evaluate --model DIR --traces requests.jsonl"
)
def evaluate(
    model: Annotated[Path, typer.Option(help="Hugging Face model folder")],
    roles: Annotated[
        Path | None, typer.Option(help='of edges and chains: {"roles": {name: text}, "instructions": {name: text}}')
    ] = None,
    contexts: Annotated[
        Path | None,
        typer.Option(help='of edges and chains: a line {"id", "use", "text"}; use "anchor" fills the pools'),
    ] = None,
    edge: Annotated[list[str] | None, typer.Option(help="source:destination; may be given several times")] = None,
    anchors: Annotated[int, typer.Option(min=1, max=1000, help="anchors of an edge")] = 10,
    rank: Annotated[int, typer.Option(min=1, max=256, help="rank of anchors and oracle")] = 32,
    head: Annotated[int, typer.Option(min=0, max=1024, help="tokens of a run that are recomputed")] = 32,
    fraction: Annotated[
        float,
        typer.Option(min=0, max=1, help="share of a run that is recomputed beside the head, where it is least sure"),
    ] = 0.05,
    theta: Annotated[float, typer.Option(min=0, help="largest ê that the gated methods accept")] = 0.048,
    chain: Annotated[str | None, typer.Option(help="also a chain of agents, as planner:solver:critic")] = None,
    tasks: Annotated[str | None, typer.Option(help="all, or NAME,NAME of: " + ", ".join(_TASKS))] = None,
    traces: Annotated[
        Path | None, typer.Option(help='your own: a chat request a line, {"trace", "agent", "messages", "response"}')
    ] = None,
    framework: Annotated[str, typer.Option(help="of tasks: sequential, loop, fan-in or fan-out")] = "sequential",
    agents: Annotated[int, typer.Option(help="of tasks: 2 to 8")] = 4,
    rounds: Annotated[int, typer.Option(help="of a loop: 1 to 4")] = 1,
    learn: Annotated[int, typer.Option(min=0, help="traces of each task set that fill the pools")] = 6,
    test: Annotated[int, typer.Option(min=1, help="traces of each task set that are measured")] = 8,
    use: Annotated[str, typer.Option(help="which traces are measured: test, or dev, to choose by")] = "test",
    temperature: Annotated[float, typer.Option(min=0, help="of answers in traces; 0: greedy")] = 0.0,
    seeds: Annotated[int, typer.Option(min=1, help="samples of each trace, at a temperature above 0")] = 1,
    methods: Annotated[
        str | None, typer.Option(help="all (also those of other papers), or NAME,NAME; default: ours and the oracle")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write summary and rows here")] = None,
) -> None:
    """Measure every method against dense prefill, on a real model, without an engine.

    On single edges (--edge, --chain) or on whole workflows (--tasks, --traces), whose calls are planned as the engine
    would plan them.
    """
    with _errors():
        from lmcache_kvcmas.evaluate.command import TraceOptions, run_command
        from lmcache_kvcmas.evaluate.frameworks import Framework
        from lmcache_kvcmas.evaluate.methods import Knobs, method_names
        from lmcache_kvcmas.evaluate.run import EvaluateSettings
        from lmcache_kvcmas.evaluate.tasks import TASKS, Counts
        from lmcache_kvcmas.evaluate.tracing import TraceSettings

        names = method_names(_listed(methods))
        knobs = Knobs(rank, head, fraction, theta)
        sets = tuple(TASKS) if tasks == "all" else tuple(_listed(tasks))
        counts = Counts(learn, test if use == "dev" else 0, test if use == "test" else 0)
        settings = TraceSettings(use, anchors, rank, temperature, seeds)
        options = TraceOptions(sets, traces, Framework(framework, agents, rounds), counts, settings)
        edges = EvaluateSettings(tuple(_pair(text) for text in edge or []), anchors, knobs, names)
        run_command(model, roles, contexts, edges, tuple(chain.split(":")) if chain else (), options, json)


@app.command(
    epilog="Example: kvcmas calibrate --model DIR --traces requests.jsonl --budget 'kl<=0.003' --config lmcache.yaml"
)
def calibrate(
    model: Annotated[Path, typer.Option(help="Hugging Face model folder")],
    budget: Annotated[
        str, typer.Option(help="kl<=NATS; kl_vs_none<=SHARE of rotation only; or points<=PERCENTAGE POINTS of accuracy")
    ] = "kl<=0.003",
    traces: Annotated[
        Path | None, typer.Option(help='your own: a chat request a line, {"trace", "agent", "messages", "response"}')
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="without --traces: NAME,NAME of " + ", ".join(_TASKS))] = None,
    framework: Annotated[str, typer.Option(help="of tasks: sequential, loop, fan-in or fan-out")] = "sequential",
    agents: Annotated[int, typer.Option(help="of tasks: 2 to 8")] = 4,
    rounds: Annotated[int, typer.Option(help="of a loop: 1 to 4")] = 1,
    learn: Annotated[int, typer.Option(min=1, help="traces of each task set that fill the pools")] = 10,
    dev: Annotated[int, typer.Option(min=1, help="traces of each task set that θ is chosen on")] = 7,
    test: Annotated[int, typer.Option(min=1, help="traces of each task set that the choice is checked on")] = 7,
    head: Annotated[str | None, typer.Option(help="also choose kvcmas.head_tokens among these: 16,32,64")] = None,
    rank: Annotated[str | None, typer.Option(help="also choose kvcmas.rank among these")] = None,
    anchors: Annotated[str | None, typer.Option(help="also choose kvcmas.max_anchors among these")] = None,
    config: Annotated[
        Path | None, typer.Option(help="LMCache file: its settings are used, θ is written into it (a .bak is kept)")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write the curve and the check here, for kvcmas report")] = None,
) -> None:
    """Choose kvcmas.theta: the most reuse that an error budget allows.

    Pools learn from some traces, θ is chosen on others, and checked on a third kind that had no part in it. Exits with
    1, and leaves the file alone, when the check is over the budget.
    """
    with _errors():
        from lmcache_kvcmas.config import Settings
        from lmcache_kvcmas.connectors.lmcache_config import load_lmcache_config
        from lmcache_kvcmas.connectors.lmcache_edit import write_settings
        from lmcache_kvcmas.evaluate.calibrate import Budget
        from lmcache_kvcmas.evaluate.calibrate_command import Choice, run_calibrate
        from lmcache_kvcmas.evaluate.command import TraceOptions
        from lmcache_kvcmas.evaluate.frameworks import Framework
        from lmcache_kvcmas.evaluate.tasks import Counts

        settings = load_lmcache_config(str(config)).settings if config else Settings()
        choice = Choice(
            _numbers("--head", head, settings.head_tokens),
            _numbers("--rank", rank, settings.rank),
            _numbers("--anchors", anchors, settings.max_anchors),
        )
        sets = tuple(_listed(tasks)) or (() if traces else ("contexts",))
        options = TraceOptions(sets, traces, Framework(framework, agents, rounds), Counts(learn, dev, test))
        values, held = run_calibrate(model, options.load(), settings, choice, Budget.parse(budget), config, json)
        if held and config:
            typer.echo(
                f"{config}: {', '.join(f'kvcmas.{n}: {v}' for n, v in values.items())}; before: "
                f"{write_settings(config, values)}"
            )
    if not held:
        typer.secho(
            "kvcmas: held-out traces are over the budget: nothing was written; give more traces", fg="red", err=True
        )
        raise typer.Exit(1)


def _numbers(option: str, text: str | None, otherwise: int) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in _listed(text)) or (otherwise,)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not NUMBER,NUMBER", param_hint=option) from error


def _listed(text: str | None) -> list[str]:
    return [] if text is None else [name.strip() for name in text.split(",")]


def _pair(text: str) -> tuple[str, str]:
    source, colon, destination = text.partition(":")
    if not colon or not source or not destination or ":" in destination:
        raise typer.BadParameter(f"{text!r} is not source:destination", param_hint="--edge")
    return source, destination


@app.command(epilog="Example: kvcmas inspect --json | jq '.models[].edges[].anchors'")
def inspect(
    config: Config = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout, and nothing else")] = False,
) -> None:
    """Show what Redis holds: models, tenants, entries, bytes, edges and their anchors, lives, memory."""
    with _errors():
        from lmcache_kvcmas.connectors.commands.inspect import run_inspect

        run_inspect(config, json)


@app.command(epilog="Example: kvcmas verify --repair || echo 'something was damaged'")
def verify(
    config: Config = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="remove what is damaged, dangling or incomplete; the exit code stays 1")
    ] = False,
    show: Annotated[int, typer.Option(min=0, help="damaged names that are printed")] = 20,
) -> None:
    """Read every entry in Redis and check it as a server would.

    Exits with 1 if anything is damaged. Records that lack entries, and pool members without anchor, are counted, but
    are no damage: eviction and expiry leave them behind. Servers treat all of it as misses.
    """
    with _errors():
        from lmcache_kvcmas.connectors.commands.verify import run_verify

        good = run_verify(config, repair, show)
    raise typer.Exit(0 if good else 1)


@app.command(epilog="Example: kvcmas purge --edge planner:solver --older-than 3d --dry-run")
def purge(
    config: Config = None,
    edge: Annotated[
        str | None,
        typer.Option(help="SOURCE:DESTINATION; its pools, anchors, and entries that name it"),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="12 hex digits, as `kvcmas inspect` shows them")] = None,
    salt: Annotated[str | None, typer.Option(help="or: the tenant's requests' cache_salt")] = None,
    model: Annotated[str | None, typer.Option(help="16 hex digits, as `kvcmas inspect` shows them")] = None,
    older_than: Annotated[str | None, typer.Option(help="entries written that long ago: 90s, 30m, 12h, 3d, 2w")] = None,
    kind: Annotated[list[str] | None, typer.Option(help=f"{', '.join(_KINDS)}; may be given several times")] = None,
    everything: Annotated[bool, typer.Option("--all", help="all of ours under the file's prefix")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would go, remove nothing")] = False,
) -> None:
    """Remove what fits all filters from Redis. Shows it, then asks.

    At least one filter, or --all. Keys of others are never touched. Servers that run go on: what they miss they
    compute. Marks of `kvcmas warmup` go with anything of their tenant, so that the next one fills what is missing.
    """
    filters = (edge, tenant, salt, model, older_than, kind)
    if not everything and all(given is None or given == [] for given in filters):
        raise typer.BadParameter(
            "give at least one of --edge, --tenant, --salt, --model, --older-than, --kind; or --all"
        )
    if everything and any(given is not None and given != [] for given in filters):
        raise typer.BadParameter("--all takes everything: give it alone, or a filter without it")
    if tenant is not None and salt is not None:
        raise typer.BadParameter("--tenant and --salt both name a tenant: give one of them")
    for name, value, digits in (("--tenant", tenant, 12), ("--model", model, 16)):
        if value is not None and (len(value) != digits or not set(value) <= set("0123456789abcdef")):
            raise typer.BadParameter(f"{value!r} is not {digits} hex digits, as inspect shows them", param_hint=name)
    for value in kind or []:
        if value not in _KINDS:
            raise typer.BadParameter(f"{value!r}. Allowed: {', '.join(_KINDS)}", param_hint="--kind")
    with _errors():
        from lmcache_kvcmas.connectors.commands.purge import Filters, run_purge
        from lmcache_kvcmas.connectors.commands.shown import parse_age
        from lmcache_kvcmas.entries import EntryKind

        try:
            seconds = None if older_than is None else parse_age(older_than)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--older-than") from error
        pair = None if edge is None else _edge(edge)
        kinds = tuple(EntryKind(value) for value in kind or [])
        done = run_purge(config, Filters(pair, tenant, salt, model, seconds, kinds), yes, dry_run)
    raise typer.Exit(0 if done else 1)


@app.command(epilog="Example: kvcmas doctor --model DIR --engine")
def doctor(
    config: Config = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face model folder that is to be served")] = None,
    engine: Annotated[bool, typer.Option("--engine", help="also start a vLLM engine with the connector")] = False,
) -> None:
    """Check versions, the LMCache file, the model and Redis: ok, warn or fail, and what to do.

    Writes 8 MiB to Redis, reads them back and removes them. Exits with 1 if any line fails.
    """
    if engine and model is None:
        raise typer.BadParameter("it needs --model DIR", param_hint="--engine")
    with _errors():
        from lmcache_kvcmas.connectors.commands.doctor import run_doctor

        good = run_doctor(config, model, engine)
    raise typer.Exit(0 if good else 1)


@app.command(
    epilog="Example: kvcmas warmup --model DIR --roles roles.json --contexts contexts.jsonl "
    "--workflow planner,solver,critic --dry-run"
)
def warmup(
    model: Annotated[Path, typer.Option(help="Hugging Face model folder, as the servers load it")],
    roles: Annotated[Path, typer.Option(help='JSON file: {"roles": {name: text}, "instructions": {name: text}}')],
    contexts: Annotated[Path, typer.Option(help='JSON lines: {"id", "use", "text"}')],
    workflow: Annotated[
        str, typer.Option(help='agents in order, or a .json file: {"turns": [{"agent", "heading"}, ...]}')
    ],
    config: Config = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first so many contexts")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=4096, help="tokens that each agent may say")] = 32,
    dtype: Annotated[
        str, typer.Option(help="the servers': auto (the model's own), float32, bfloat16, float16")
    ] = "auto",
    salt: Annotated[str, typer.Option(help="cache_salt of the requests that are to find this")] = "",
    hints: Annotated[
        bool, typer.Option("--hints", help="name agents as the roles file does, as your clients do")
    ] = False,
    tokens_per_second: Annotated[float, typer.Option(min=0.1, help="prefill speed that the estimate assumes")] = 250.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what there is to do, and how much; run nothing")
    ] = False,
) -> None:
    """Run a workflow over contexts in an engine of its own, so that servers find its caches in Redis.

    Every prompt is prefilled densely: what is stored is exact, and each pair of agents learns from it. What was done
    before is left out; what was interrupted or has expired is done again. For servers with one tensor-parallel rank.
    """
    with _errors():
        from lmcache_kvcmas.connectors.commands.warmup import WarmupOptions, run_warmup

        options = WarmupOptions(
            model, roles, contexts, workflow, limit, max_tokens, dtype, salt, hints, tokens_per_second, dry_run
        )
        good = run_warmup(config, options)
    raise typer.Exit(0 if good else 1)


def _edge(text: str) -> tuple[str, str]:
    source, _, destination = text.partition(":")
    if not source or not destination or ":" in destination:
        raise typer.BadParameter(f"{text!r} is not SOURCE:DESTINATION", param_hint="--edge")
    return source, destination


@contextmanager
def _errors() -> Iterator[None]:
    """One red line, and an exit code, for what a person can do something about."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    try:
        yield
    except KVCMASError as error:
        typer.secho(f"kvcmas: {error}", fg="red", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error
