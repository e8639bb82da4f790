"""What a client may say about its request. Hints narrow the search and name agents; they are never trusted further."""

from dataclasses import dataclass

LONGEST = 256
"""Characters of a hint."""

_NAMES = ("agent", "workflow", "source")
_SWITCHES = ("share", "capture")
_KNOWN = (*_NAMES, *_SWITCHES)


@dataclass(frozen=True, slots=True)
class Hints:
    """The ``kvcmas`` field of a request's ``kv_transfer_params``."""

    agent: str | None = None
    """Who is asking."""
    workflow: str | None = None
    """Only records of this workflow, or of none, may serve."""
    source: str | None = None
    """Only records that this agent left may serve."""
    share: bool = True
    """False: take nothing but the exact prefix. The request is still learned from."""
    capture: bool = True
    """False: leave nothing behind, and teach nothing."""


def parse_hints(params: object) -> tuple[Hints, tuple[str, ...]]:
    """Read ``kv_transfer_params``, whatever a client put there. Never raises.

    Returns:
        The hints, each malformed field left at its default; and one sentence for every field that was ignored, without
        the client's text in it beyond a short excerpt, fit for a log.
    """
    if params is None:
        return Hints(), ()
    if not isinstance(params, dict):
        return Hints(), (f"kv_transfer_params must be an object, got {type(params).__name__}: ignored",)
    given = params.get("kvcmas")
    if given is None:
        return Hints(), ()
    if not isinstance(given, dict):
        return Hints(), (f"kv_transfer_params.kvcmas must be an object, got {type(given).__name__}: ignored",)
    problems: list[str] = []
    names: dict[str, str | None] = {}
    for field in _NAMES:
        names[field] = _name(field, given.get(field), problems)
    switches: dict[str, bool] = {}
    for field in _SWITCHES:
        value = given.get(field)
        if value is not None and not isinstance(value, bool):
            problems.append(f"kvcmas.{field} must be true or false, got {_excerpt(value)}: ignored")
            value = None
        switches[field] = True if value is None else value
    unknown = [k for k in given if not isinstance(k, str) or k not in _KNOWN]
    if unknown:
        listed = ", ".join(_excerpt(k) for k in unknown[:4])
        problems.append(f"kvcmas.{{{listed}}} is unknown (known: {', '.join(_KNOWN)}): ignored")
    hints = Hints(names["agent"], names["workflow"], names["source"], switches["share"], switches["capture"])
    return hints, tuple(problems)


def _name(field: str, value: object, problems: list[str]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        problems.append(f"kvcmas.{field} must be a string that is not empty, got {_excerpt(value)}: ignored")
        return None
    if len(value) > LONGEST:
        problems.append(f"kvcmas.{field} has {len(value)} characters, at most {LONGEST} are allowed: ignored")
        return None
    return value.strip()


def _excerpt(value: object) -> str:
    """Type and beginning; never a repr of something a client may have made huge or strange."""
    if isinstance(value, str):
        return repr(value[:32]) + ("…" if len(value) > 32 else "")
    if isinstance(value, bool | int | float) and abs(value) < 1e9:
        return repr(value)
    return type(value).__name__
