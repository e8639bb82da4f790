"""The `kvcmas` command. Heavy modules are imported by the command that needs them, so that `--help` is quick.

Exit codes: 0 all is well, 1 something was found, refused or not reachable, 2 the options or the file are wrong.
"""

from pathlib import Path
from typing import Annotated

import typer

from lmcache_kvcmas.connectors.cli_measure import measure
from lmcache_kvcmas.connectors.cli_options import errors, pair_of

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="KV caches that agents take over from one another: measure the method, look after the shared tier, fill it.",
    epilog="Exit codes: 0 all is well; 1 something was found, refused or not reachable; 2 wrong options or settings.",
)
app.add_typer(measure)

Config = Annotated[
    Path | None, typer.Option("--config", help="LMCache file; default: the one that LMCACHE_CONFIG_FILE names")
]
_KINDS = ("record", "base", "delta", "anchor", "pool")


@app.command(epilog="Example: kvcmas inspect --json | jq '.models[].edges[].anchors'")
def inspect(
    config: Config = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout, and nothing else")] = False,
) -> None:
    """Show what Redis holds: models, tenants, entries, bytes, edges and their anchors, lives, memory."""
    with errors():
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
    with errors():
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
    with errors():
        from lmcache_kvcmas.connectors.commands.purge import Filters, run_purge
        from lmcache_kvcmas.connectors.commands.shown import parse_age
        from lmcache_kvcmas.entries import EntryKind

        try:
            seconds = None if older_than is None else parse_age(older_than)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--older-than") from error
        pair = None if edge is None else pair_of("--edge", edge)
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
    with errors():
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
    with errors():
        from lmcache_kvcmas.connectors.commands.warmup import WarmupOptions, run_warmup

        options = WarmupOptions(
            model, roles, contexts, workflow, limit, max_tokens, dtype, salt, hints, tokens_per_second, dry_run
        )
        good = run_warmup(config, options)
    raise typer.Exit(0 if good else 1)
