"""Ways to turn a source agent's cache of a run into the destination agent's, ours and others'. One file a method."""

from collections.abc import Callable, Sequence

from ...errors import ConfigError
from ..cases import Case, Outcome, place
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

METHODS: dict[str, Callable[[int], Method]] = {
    "none": lambda rank: Predicted("none", "none", False),
    "head": lambda rank: Predicted("head", "none", True),
    "paper": lambda rank: Predicted("paper", "paper", False),
    "paper+head": lambda rank: Predicted("paper+head", "paper", True),
    "mean+head": lambda rank: Predicted("mean+head", "mean", True),
    "attention": lambda rank: Predicted("attention", "attention", False),
    "attention+head": lambda rank: Predicted("attention+head", "attention", True),
    "oracle": lambda rank: Oracle("oracle", False, rank),
    "oracle+head": lambda rank: Oracle("oracle+head", True, rank),
    "attention+head+gate": lambda rank: Gated("attention+head+gate", Predicted("attention+head", "attention", True)),
    "dense": lambda rank: Dense(),
    "kvcomm": lambda rank: KVComm(),
    "kvcmas": lambda rank: KVCMAS(),
    "cacheblend": lambda rank: CacheBlend(),
    "droidspeak": lambda rank: DroidSpeak(),
    "relaycaching": lambda rank: RelayCaching(),
    "epic": lambda rank: Epic(),
    "graphflow": lambda rank: GraphFlow(),
    "kamera": lambda rank: Kamera(),
}
"""By name; each is built for a rank, which only the oracle heeds: the others have their own."""

DEFAULT_METHODS = tuple(METHODS)[:9]

__all__ = [
    "DEFAULT_METHODS",
    "METHODS",
    "Case",
    "Method",
    "Oracle",
    "Outcome",
    "Predicted",
    "build_methods",
    "default_methods",
    "method_names",
    "place",
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


def build_methods(names: Sequence[str], rank: int = 32) -> tuple[Method, ...]:
    return tuple(METHODS[name](rank) for name in names)


def default_methods(rank: int = 32) -> tuple[Method, ...]:
    """What `kvcmas evaluate` compares unless asked for more. ``attention+head`` is the product's default."""
    return build_methods(DEFAULT_METHODS, rank)
