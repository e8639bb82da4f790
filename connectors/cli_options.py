"""What the commands have in common: how options are taken apart, and how errors are told."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from lmcache_kvcmas.errors import KVCMASError


def pair_of(option: str, text: str) -> tuple[str, str]:
    """SOURCE and DESTINATION of ``SOURCE:DESTINATION``."""
    source, _, destination = text.partition(":")
    if not source or not destination or ":" in destination:
        raise typer.BadParameter(f"{text!r} is not SOURCE:DESTINATION", param_hint=option)
    return source, destination


def listed(text: str | None) -> list[str]:
    """Names of ``NAME,NAME``; none of None."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def numbers_of(option: str, text: str | None, otherwise: int) -> tuple[int, ...]:
    """Of ``NUMBER,NUMBER``; ``otherwise`` of None."""
    try:
        return tuple(int(n) for n in listed(text)) or (otherwise,)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not NUMBER,NUMBER", param_hint=option) from error


@contextmanager
def errors() -> Iterator[None]:
    """One red line, and an exit code, for what a person can do something about."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    try:
        yield
    except KVCMASError as error:
        typer.secho(f"kvcmas: {error}", fg="red", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error
