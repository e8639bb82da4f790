"""Ways to turn a source agent's cache of a run into the destination agent's, ours and others'. One file a method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...config import Settings
from ...errors import ConfigError
from .base import Method
from .cacheblend import CacheBlend
from .dense import Dense
from .droidspeak import DroidSpeak
from .epic import Epic
from .gated import Gated
from .graphflow import GraphFlow
from .kamera import Kamera
from .kvcmas import KVCMAS
from .kvcomm import KVComm
from .oracle import Oracle
from .predicted import Predicted
from .relaycaching import RelayCaching
from .sized import Sized

_DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
class Knobs:
    """What a user can set of our own methods. The others have the values of their papers."""

    rank: int = _DEFAULTS.rank
    """Of anchors and of the oracle."""
    head: int = _DEFAULTS.head_tokens
    """Leading tokens of a run that are recomputed."""
    fraction: float = _DEFAULTS.recompute_fraction
    """Share of the tokens behind the head that `chosen` recomputes as well."""
    theta: float = _DEFAULTS.theta
    budget: float = 0.15
    """Share of a run's tokens that `attention+chosen` recomputes, which has no head: a cap on the whole."""


def _ours(name: str, knobs: Knobs) -> Predicted:
    """Ours by the parts of its name: ``attention+head+chosen``."""
    kind, *parts = name.split("+")
    head = knobs.head if "head" in (kind, *parts) else 0
    fraction = (knobs.fraction if "head" in parts else knobs.budget) if "chosen" in parts else 0.0
    return Predicted(name, "none" if kind == "head" else kind, head, fraction)


def product(predictor: str, knobs: Knobs) -> Gated:
    """The product as it is served, with a predictor that a user may have chosen."""
    return _gated(f"{predictor}+head+chosen+gate", knobs)


def _gated(name: str, knobs: Knobs) -> Gated:
    return Gated(name, _ours(name.removesuffix("+gate"), knobs), knobs.theta)


_OURS = (
    "none",
    "head",
    "paper",
    "paper+head",
    "mean+head",
    "attention",
    "attention+head",
    "attention+head+chosen",
    "attention+chosen",
)

METHODS: dict[str, Callable[[Knobs], Method]] = {
    **{name: partial(_ours, name) for name in _OURS},
    "oracle": lambda knobs: Oracle("oracle", 0, knobs.rank),
    "oracle+head": lambda knobs: Oracle("oracle+head", knobs.head, knobs.rank),
    **{name: partial(_gated, name) for name in ("attention+head+gate", "attention+head+chosen+gate")},
    "dense": lambda knobs: Dense(),
    "kvcomm": lambda knobs: KVComm(),
    "kvcmas": lambda knobs: KVCMAS(),
    "cacheblend": lambda knobs: CacheBlend(),
    "droidspeak": lambda knobs: DroidSpeak(),
    "relaycaching": lambda knobs: RelayCaching(),
    "epic": lambda knobs: Epic(),
    "graphflow": lambda knobs: GraphFlow(),
    "kamera": lambda knobs: Kamera(),
}

DEFAULT_METHODS = tuple(METHODS)[:11]

__all__ = [
    "DEFAULT_METHODS",
    "METHODS",
    "Gated",
    "Knobs",
    "Method",
    "Oracle",
    "Predicted",
    "Sized",
    "build_methods",
    "method_names",
    "product",
]


def method_names(given: Sequence[str]) -> tuple[str, ...]:
    """Names asked for, each once; rotation only (`none`), which all are compared with, always among them, in front.

    Raises ConfigError for a name that does not exist.
    """
    if not given:
        return DEFAULT_METHODS
    names = tuple(METHODS) if list(given) == ["all"] else tuple(given)
    for name in names:
        if name not in METHODS:
            raise ConfigError(f"--methods: {name!r} is not a method; it must be all, or some of {', '.join(METHODS)}")
    return tuple(dict.fromkeys(("none", *names)))


def build_methods(names: Sequence[str], knobs: Knobs | None = None) -> tuple[Method, ...]:
    return tuple(METHODS[name](knobs or Knobs()) for name in names)
