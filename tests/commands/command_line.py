"""The command line, as a person calls it."""

from pathlib import Path

from typer.testing import CliRunner, Result

from lmcache_kvcmas.connectors.cli import app


def run(*arguments: str | Path, said: str | None = None) -> Result:
    """What `kvcmas` does on a terminal of 80 columns; ``said`` is typed."""
    return CliRunner().invoke(app, [str(a) for a in arguments], input=said, env={"COLUMNS": "80"})
