"""What decides the product's defaults: one setting changed at a time, all else as it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import torch

from ..config import Settings
from .chain import MODES, evaluate_chain
from .figures import Variant
from .measures import bootstrap
from .methods import Method, Predicted, Sized
from .methods.picked import POLICIES, Evicting, PerKind
from .run import EvaluateSettings, Row, evaluate
from .runs import DenseRuns
from .summaries import summarise

_DEFAULTS = Settings()
_OURS = Predicted("ours", _DEFAULTS.predictor, _DEFAULTS.head_tokens, _DEFAULTS.recompute_fraction)
_POOL = 5  # anchors where pools of one size are compared: of each kind of text there are not many more


@dataclass(frozen=True, slots=True)
class Tried:
    """One value of a setting."""

    axis: str
    value: str
    default: bool
    method: Method


AXES = (
    "rank",
    "anchors",
    "head",
    "fraction",
    "tokens an anchor keeps",
    "predictor",
    "factor dtype",
    "eviction",
    "pools",
    "topology",
)


def variants(axes: Sequence[str]) -> list[Tried]:
    """All of ``axes`` but `topology`, which is measured on chains."""
    d = _DEFAULTS
    made = {
        "rank": [_variant("rank", n, n == d.rank, rank=n) for n in (8, 16, 32, 64, 128)],
        "anchors": [_variant("anchors", n, n == d.max_anchors, anchors=n) for n in (1, 2, 3, 5, 10, 15, 20)],
        "head": [_variant("head", n, n == d.head_tokens, replace(_OURS, head=n)) for n in (0, 8, 16, 32, 64, 128)],
        "fraction": [
            _variant("fraction", f, f == d.recompute_fraction, replace(_OURS, fraction=f))
            for f in (0.0, 0.04, 0.08, 0.12, 0.16)
        ],
        "tokens an anchor keeps": [
            _variant("tokens an anchor keeps", n, n == d.anchor_tokens, keep=n) for n in (32, 64, 128, 256, 512)
        ],
        "predictor": [
            _variant("predictor", p, p == d.predictor, replace(_OURS, kind=p))
            for p in ("attention", "paper", "mean", "none")
        ],
        "factor dtype": [
            _variant("factor dtype", str(t).removeprefix("torch."), t == torch.bfloat16, dtype=t)
            for t in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        ],
        "eviction": [Tried("eviction", p, p == "mass", Evicting(f"eviction={p}", _OURS, p, _POOL)) for p in POLICIES],
        "pools": [
            Tried("pools", "mixed", True, Sized("pools=mixed", _OURS, _POOL)),
            Tried("pools", "per kind of text", False, PerKind("pools=per kind of text", _OURS, _POOL)),
        ],
    }
    return [v for axis in axes for v in made.get(axis, [])]


def ablate(
    runs: DenseRuns, edges: Sequence[tuple[str, str]], axes: Sequence[str], progress: Callable[[str], None]
) -> dict[str, list[Variant]]:
    """Each axis' values, on all edges and test contexts.

    Pools learn from all anchor contexts that their size allows; sizes beyond the number of those are left out.
    """
    most = len(runs.workload.anchors)
    some = [v for v in variants(axes) if v.axis != "anchors" or int(v.value) <= most]
    methods = (Predicted("none", "none"), *(v.method for v in some))
    settings = EvaluateSettings(tuple(edges), anchors=len(runs.workload.anchors))
    rows = evaluate(runs, settings, methods, progress) if some else []
    found = {axis: [_ablated(v, rows) for v in some if v.axis == axis] for axis in axes if axis != "topology"}
    if "topology" in axes:
        found["topology"] = _topology(runs, edges, progress)
    return found


def _variant(
    axis: str,
    value: object,
    default: bool,
    inner: Predicted = _OURS,
    *,
    rank: int = _DEFAULTS.rank,
    anchors: int = _DEFAULTS.max_anchors,
    keep: int = _DEFAULTS.anchor_tokens,
    dtype: torch.dtype = torch.bfloat16,
) -> Tried:
    return Tried(axis, str(value), default, Sized(f"{axis}={value}", inner, anchors, rank, keep, dtype))


def _ablated(variant: Tried, rows: Sequence[Row]) -> Variant:
    of = summarise([r for r in rows if r.method in ("none", variant.method.name)])[variant.method.name]
    return Variant(
        value=variant.value,
        default=variant.default,
        kl_vs_none=of.kl_vs_none,
        kl_vs_none_ci=of.kl_vs_none_ci,
        recompute=of.recompute,
        state_bytes=of.state_bytes,
        seconds=of.seconds,
    )


def _topology(runs: DenseRuns, edges: Sequence[tuple[str, str]], progress: Callable[[str], None]) -> list[Variant]:
    """Where a correction starts from, over the chain that the edges make: all hops together, ÷ rotation only."""
    agents = [edges[0][0], *(b for _, b in edges)]
    if any(left[1] != right[0] for left, right in pairwise(edges)):
        return []
    modes = [m for m in MODES if m != "gated"]
    rows = evaluate_chain(runs, agents, progress=progress, modes=modes)
    none = [r.kl for r in rows if r.mode == "uncorrected"]
    found = []
    for mode in modes:
        kls = [r.kl for r in rows if r.mode == mode]
        found.append(Variant(mode, fmean(kls) / fmean(none), bootstrap(kls, none), mode == "chained"))
    return found
