"""The `kvcmas` command. Heavy modules are imported by the command that needs them, so that `--help` is quick."""

from pathlib import Path
from typing import Annotated

import typer

from .errors import KVCMASError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="KV caches that agents take over from one another.")


@app.callback()
def _commands() -> None:
    """Keeps `evaluate` a command of its own while it is the only one."""


@app.command()
def evaluate(
    model: Annotated[Path, typer.Option(help="Hugging Face model folder")],
    roles: Annotated[Path, typer.Option(help='JSON file: {"roles": {name: text}, "instructions": {name: text}}')],
    contexts: Annotated[Path, typer.Option(help='JSON lines: {"id", "use", "text"}; "use": "anchor" fills the pools')],
    edge: Annotated[list[str] | None, typer.Option(help="source:destination; may be given several times")] = None,
    anchors: Annotated[int, typer.Option(min=1, max=1000, help="anchors of an edge")] = 10,
    rank: Annotated[int, typer.Option(min=1, max=256, help="rank of anchors and oracle")] = 32,
    head: Annotated[int, typer.Option(min=0, max=1024, help="tokens of a run that are recomputed")] = 32,
    chain: Annotated[str | None, typer.Option(help="also a chain of agents, as planner:solver:critic")] = None,
    json: Annotated[Path | None, typer.Option(help="write summary and rows here")] = None,
) -> None:
    """Measure every method against dense prefill, on a real model, without an engine."""
    from .evaluate.command import run_command
    from .evaluate.run import EvaluateSettings

    edges = []
    for text in edge or []:
        source, colon, destination = text.partition(":")
        if not colon or not source or not destination or ":" in destination:
            raise typer.BadParameter(f"{text!r} is not source:destination", param_hint="--edge")
        edges.append((source, destination))
    settings = EvaluateSettings(tuple(edges), anchors, rank, head)
    try:
        run_command(model, roles, contexts, settings, tuple(chain.split(":")) if chain else (), json)
    except KVCMASError as error:
        typer.secho(f"kvcmas: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
