"""Our settings: the ``kvcmas.*`` keys under ``extra_config`` of LMCache's YAML file.

LMCache hands ``extra_config`` on without looking into it, so everything that can be wrong with a key or a value is
found here, and said with the setting's name, the value given, and what is allowed.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lmcache_kvcmas.codecs import CODECS
from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.rules import Bytes, Choice, Positive, Rule, Share, Switch, Text, Whole, shown

PREFIX = "kvcmas."

PREDICTORS = ("attention", "paper", "mean", "none")

_RULES: dict[str, Rule] = {
    "rank": Whole(1, 256),
    "head_tokens": Whole(0, 1024),
    "recompute_fraction": Share(),
    "min_run_tokens": Whole(64, 1 << 20),
    "max_gap_tokens": Whole(0, 1 << 20),
    "max_anchors": Whole(1, 64),
    "anchor_tokens": Whole(16, 4096),
    "min_anchors": Whole(1, 64),
    "predictor": Choice(PREDICTORS),
    "theta": Positive(),
    "chain_theta": Positive(),
    "salt": Text(),
    "base_codec": Choice(CODECS),
    "max_records": Whole(1, 1 << 20),
    "hot_bytes": Bytes(0),
    "learn": Switch(),
    "capture": Switch(),
    "nested": Switch(),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a person can set. Frozen, and valid once it exists: the constructor checks what the file's reader checks.

    Raises:
        ConfigError: a value of the wrong type, or out of range.
    """

    rank: int = 32
    """``r``: rank of every stored delta and anchor factor (1 to 256)."""
    head_tokens: int = 32
    """Leading tokens of each run that the model recomputes (0 to 1024); prediction is weakest there."""
    recompute_fraction: float = 0.08
    """Share of a predicted span's tokens (0 to 1; the head is not part of it) that the model recomputes besides: those
    that the anchors disagree about most. 0 where ``nested`` does not work."""
    min_run_tokens: int = 64
    """Shortest shared run that is looked at, in tokens; 64 is the shortest that matching is sure to find."""
    max_gap_tokens: int = 512
    """Longest stretch between two runs that is computed so that the second can be used, in tokens."""
    max_anchors: int = 10
    """``A``: anchors kept for each edge (1 to 64)."""
    anchor_tokens: int = 256
    """Tokens kept of each anchor (16 to 4096)."""
    min_anchors: int = 2
    """Anchors that an edge needs before its predictions are used (1 to ``max_anchors``)."""
    predictor: str = "attention"
    """``attention``, ``paper``, ``mean`` or ``none`` (keys are rotated, nothing is added)."""
    theta: float = 0.048
    """Largest ê at which a prediction is used. Belongs to a model; this one to SmolLM2-135M-Instruct."""
    chain_theta: float = 0.0
    """Largest sqrt(Σ ê²) along a chain of hops; 2·theta unless set."""
    salt: str = ""
    """Part of every key and every fingerprint: servers with different salts never share. No client can change it."""
    base_codec: str = "raw"
    """How full-width chunks are stored: ``raw``, ``fp8`` or ``int8``. With a lossy one, no own prefix is exact."""
    max_records: int = 4096
    """Records that the index of runs holds; beyond it the oldest is forgotten."""
    hot_bytes: int = 1 << 30
    """Budget of the in-process tier of unpacked caches and factors, in bytes; "512MiB" works in the file."""
    learn: bool = True
    """Measure deltas of requests that were prefilled although a source existed, and offer them to anchor pools."""
    capture: bool = True
    """Keep the caches of finished requests, generated tokens included."""
    nested: bool = True
    """Compute heads, gaps and chosen tokens inside the engine; without it, runs are used whole and gaps end the
    reuse."""

    def __post_init__(self) -> None:
        if self.chain_theta == 0.0 and isinstance(self.chain_theta, float):
            object.__setattr__(self, "chain_theta", 2 * _checked("theta", self.theta))
        for field in fields(self):
            object.__setattr__(self, field.name, _checked(field.name, getattr(self, field.name)))
        if self.min_anchors > self.max_anchors:
            raise ConfigError(
                f"{PREFIX}min_anchors is {self.min_anchors}, more than {PREFIX}max_anchors ({self.max_anchors}): no "
                f"edge could ever hold enough. Allowed: 1 to {self.max_anchors}."
            )

    @property
    def predictor_learns(self) -> bool:
        """Whether there are anchors, which may be too few, or disagree."""
        return self.predictor != "none"

    def recomputed(self, tokens: int) -> int:
        """How many of a predicted span's ``tokens`` are chosen to be recomputed, where they can be; no larger share."""
        return share_of(self.recompute_fraction, tokens) if self.predictor_learns else 0

    @classmethod
    def from_extra_config(cls, extra: Mapping[Any, Any] | None) -> "Settings":
        """The settings in ``extra_config``; keys that are not ours are left to others.

        Raises:
            ConfigError: an unknown ``kvcmas.*`` key (the nearest known one is named), or a bad value.
        """
        if extra is not None and not isinstance(extra, Mapping):
            raise ConfigError(f"extra_config is {extra!r}. Allowed: a mapping, such as `{PREFIX}rank: 32`.")
        values: dict[str, Any] = {}
        for key, value in (extra or {}).items():
            if not is_ours(key):
                continue
            name = key.removeprefix(PREFIX)
            if name == key or name not in _RULES:
                raise ConfigError(_unknown(key))
            values[name] = _checked(name, value)
        return cls(**values)


def share_of(fraction: float, tokens: int) -> int:
    """Whole tokens of a share, no larger; a product that rounding left just below a whole number is that number."""
    return int(fraction * tokens + 1e-6)


def is_ours(key: Any) -> bool:
    """Whether a key was meant for us: ``kvcmas``, with a dot or without, in any case, with a typing slip or without."""
    if not isinstance(key, str):
        return False
    head = re.split(r"[._-]", key.lower(), maxsplit=1)[0]
    return head.startswith("kvcmas") or bool(difflib.get_close_matches(head, ["kvcmas"], cutoff=0.8))


def refuse_misplaced(top_level: Mapping[Any, Any]) -> None:
    """LMCache drops keys that it does not know, so a setting of ours beside ``extra_config`` would silently not count.

    Raises:
        ConfigError: such a key stands at the top level of the file.
    """
    for key in top_level:
        if is_ours(key):
            raise ConfigError(
                f"{key} stands at the top level of the LMCache file, where LMCache drops it. Allowed: "
                f"under extra_config, as `extra_config: {{{_nearest(key)}: ...}}`."
            )


def _checked(name: str, value: Any) -> Any:
    parsed = _RULES[name].parse(value)
    if parsed is None:
        raise ConfigError(f"{PREFIX}{name} is {shown(value)}. Allowed: {_RULES[name].allowed}.")
    return parsed


def _nearest(key: str) -> str:
    _, *names = re.split(r"[._-]", key.lower(), maxsplit=1)
    near = difflib.get_close_matches(names[0].replace("-", "_"), _RULES, n=1, cutoff=0.4) if names else []
    return PREFIX + (near[0] if near else "rank")


def _unknown(key: str) -> str:
    return (
        f"{shown(key)} in extra_config is not a setting. Did you mean {_nearest(key)}? "
        f"Allowed: {', '.join(PREFIX + name for name in _RULES)}."
    )
