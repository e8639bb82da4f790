"""The commands that measure: `kvcmas evaluate`, `calibrate`, `ablate`, and `report`, which shows what they found."""

from pathlib import Path
from typing import Annotated

import typer

from lmcache_kvcmas.connectors.cli_options import errors, listed, numbers_of, pair_of

measure = typer.Typer()

_TASKS = ("contexts", "reasoning", "multihop", "singlehop", "bfcl", "humaneval", "long")


@measure.command(
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
    ] = 0.08,
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
    with errors():
        from lmcache_kvcmas.evaluate.command import TraceOptions, run_command
        from lmcache_kvcmas.evaluate.frameworks import Framework
        from lmcache_kvcmas.evaluate.methods import Knobs, method_names
        from lmcache_kvcmas.evaluate.run import EvaluateSettings
        from lmcache_kvcmas.evaluate.tasks import TASKS, Counts
        from lmcache_kvcmas.evaluate.tracing import TraceSettings

        names = method_names(listed(methods))
        knobs = Knobs(rank, head, fraction, theta)
        sets = tuple(TASKS) if tasks == "all" else tuple(listed(tasks))
        counts = Counts(learn, test if use == "dev" else 0, test if use == "test" else 0)
        settings = TraceSettings(use, anchors, rank, temperature, seeds)
        options = TraceOptions(sets, traces, Framework(framework, agents, rounds), counts, settings)
        edges = EvaluateSettings(tuple(pair_of("--edge", text) for text in edge or []), anchors, knobs, names)
        run_command(model, roles, contexts, edges, tuple(chain.split(":")) if chain else (), options, json)


@measure.command(
    epilog="Example: kvcmas calibrate --model DIR --traces requests.jsonl --budget 'kl<=0.003' --config lmcache.yaml"
)
def calibrate(
    model: Annotated[Path, typer.Option(help="Hugging Face model folder")],
    budget: Annotated[
        str, typer.Option(help="kl<=NATS; kl_vs_none<=SHARE of rotation only; or points<=PERCENTAGE POINTS of accuracy")
    ] = "kl<=0.003",
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="share of resampled dev traces on which θ must keep the budget")
    ] = 0.9,
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
    with errors():
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
            numbers_of("--head", head, settings.head_tokens),
            numbers_of("--rank", rank, settings.rank),
            numbers_of("--anchors", anchors, settings.max_anchors),
        )
        sets = tuple(listed(tasks)) or (() if traces else ("contexts",))
        options = TraceOptions(sets, traces, Framework(framework, agents, rounds), Counts(learn, dev, test))
        allowed = Budget.parse(budget, confidence)
        values, held = run_calibrate(model, options.load(), settings, choice, allowed, config, json)
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


@measure.command(
    epilog="Example: kvcmas ablate --model DIR --roles roles.json --contexts contexts.jsonl --edge solver:critic "
    "--axes rank,head --json ablations.json"
)
def ablate(
    model: Annotated[Path, typer.Option(help="Hugging Face model folder")],
    roles: Annotated[Path, typer.Option(help='{"roles": {name: text}, "instructions": {name: text}}')],
    contexts: Annotated[Path, typer.Option(help='a line {"id", "use", "text"}; use "anchor" fills the pools')],
    edge: Annotated[
        list[str] | None,
        typer.Option(help="source:destination; may be given several times; default: from each role to the next"),
    ] = None,
    axes: Annotated[str | None, typer.Option(help="NAME,NAME of the settings to change; default: all")] = None,
    json: Annotated[Path | None, typer.Option(help="write what was found here, for kvcmas report")] = None,
) -> None:
    """Change one setting of the method at a time: what the defaults were decided by."""
    with errors():
        from lmcache_kvcmas.evaluate.ablate import AXES
        from lmcache_kvcmas.evaluate.command import run_ablate

        pairs = tuple(pair_of("--edge", text) for text in edge or [])
        run_ablate(model, roles, contexts, pairs, listed(axes) or list(AXES), json)


@measure.command(epilog="Example: kvcmas report out.json calibration.json ablations.json --out report.html")
def report(
    documents: Annotated[list[Path], typer.Argument(help="what evaluate, calibrate and ablate wrote with --json")],
    out: Annotated[Path, typer.Option(help="the page")] = Path("report.html"),
    plots: Annotated[Path | None, typer.Option(help="a folder for its charts as PNG and SVG")] = None,
) -> None:
    """Make one HTML page of what was measured, which needs no network."""
    with errors():
        from lmcache_kvcmas.evaluate.page import run_report

        run_report(documents, out, plots)
    typer.echo(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")
