"""What the commands that measure have in common: a progress bar, and files that can be written before work begins."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..errors import ConfigError


class Bar:
    """Called with what is about to be done, once a unit of work."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def expect(self, units: int) -> None:
        """How often it will be called."""
        self._progress.update(self._task, total=units)

    def __call__(self, what: str) -> None:
        self._progress.update(self._task, description=what, advance=1)


@contextmanager
def progress_bar(name: str) -> Iterator[Bar]:
    """On stderr; says ``name`` until it is called. The only one: transformers' own, of loading weights, is off."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=None)
        yield Bar(progress, task)
        progress.update(task, description="done")


def writable(path: Path | None, option: str = "--json") -> None:
    """Raise ConfigError unless ``path`` can be written; its folder is made if it is not there."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written")
