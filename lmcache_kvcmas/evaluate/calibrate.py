"""Choosing the gate's θ: how accuracy falls as more is reused, and the largest reuse that a budget allows."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from ..errors import ConfigError
from .figures import CurvePoint, HeldOut
from .measures import bootstrap
from .serve import TraceRow

MEASURES = ("kl", "kl_vs_none", "points")
_BUDGET = re.compile(r"\s*(kl|kl_vs_none|points)\s*<=\s*([0-9.eE+-]+)\s*")


class Budget(NamedTuple):
    """The most that an answer may suffer."""

    measure: str
    """``kl``: nats to dense, mean over calls. ``kl_vs_none``: the same ÷ rotation only. ``points``: percentage points
    of accuracy below dense."""
    limit: float
    confidence: float = 0.9
    """θ must keep within the limit on so large a share of resampled traces; 0.5 or more."""

    @classmethod
    def parse(cls, text: str, confidence: float = 0.9) -> "Budget":
        """Of ``kl<=0.003``. Raises ConfigError."""
        found = _BUDGET.fullmatch(text)
        try:
            limit = float(found[2]) if found else math.nan
        except ValueError:
            limit = math.nan
        if found is None or not limit >= 0 or math.isinf(limit):
            raise ConfigError(f"--budget is {text!r}. Allowed: {', '.join(f'{m}<=NUMBER' for m in MEASURES)}")
        return cls(found[1], limit, confidence)

    def __str__(self) -> str:
        return f"{self.measure}<={self.limit:g}"


class Measured(NamedTuple):
    """The same calls by the method, by rotation only and by dense prefill."""

    ours: Sequence[TraceRow]
    none: Sequence[TraceRow]
    dense: Sequence[TraceRow]

    @classmethod
    def of(cls, rows: Sequence[TraceRow], method: str) -> "Measured":
        return cls(*([r for r in rows if r.method == name] for name in (method, "none", "dense")))


def curve(measured: Measured, budget: Budget) -> list[CurvePoint]:
    """A point for every θ at which one more call is accepted, from none at all.

    ``ours`` ran with the gate open. What a θ refuses counts as dense: no error, no reuse. In service a refusal also
    spares the agents behind it some error, so that a θ costs no more than its point says. Raises ConfigError where the
    budget is one of accuracy and nothing was judged.
    """
    ehats = sorted({r.ehat for r in measured.ours if r.ehat is not None})
    points = [_point(measured, theta) for theta in [0.0, *ehats]]
    return [msgspec.structs.replace(p, at_most=_at_most(measured, p, budget)) for p in points]


def choose_theta(points: Sequence[CurvePoint], budget: Budget) -> CurvePoint:
    """The point of most reuse that is within the budget, as is its ``at_most``; the first, of no reuse, always is."""
    within = (p for p in points if max(spent(p, budget), p.at_most or 0.0) <= budget.limit)
    return max(within, key=lambda p: (p.reuse, -p.theta))


def judge(measured: Measured, theta: float, budget: Budget) -> HeldOut:
    """``ours`` ran with the gate at ``theta``."""
    point = _point(measured, math.inf)
    kls: dict[str, list[float]] = {}
    for row in measured.ours:
        kls.setdefault(row.trace, []).append(row.kl)
    return HeldOut(
        reuse=point.reuse,
        kl=point.kl,
        kl_ci=bootstrap([fmean(k) for k in kls.values()]),
        kl_vs_none=point.kl_vs_none,
        accepted=fmean(r.accepted for r in measured.ours),
        accuracy=point.accuracy,
        points=point.points,
        within_budget=spent(point, budget) <= budget.limit,
    )


def spent(point: CurvePoint, budget: Budget) -> float:
    """Of the budget. Raises ConfigError where it is one of accuracy and nothing was judged."""
    value = {"kl": point.kl, "kl_vs_none": point.kl_vs_none, "points": point.points}[budget.measure]
    if value is None:
        raise ConfigError(f"--budget {budget}: no trace has a right answer; give tasks or traces that have")
    return value


def _at_most(measured: Measured, point: CurvePoint, budget: Budget) -> float:
    """Of the budget's measure, the end of its one-sided bootstrap interval over whole traces."""
    above: dict[tuple[str, str], float] = defaultdict(float)
    below: dict[tuple[str, str], float] = defaultdict(float)
    passed = _passed(measured, point.theta)
    for ours, none, dense, accepted in zip(*measured, passed, strict=True):
        trace = (ours.workload, ours.trace)
        if budget.measure != "points":
            above[trace] += ours.kl if accepted else 0.0
            below[trace] += none.kl if budget.measure == "kl_vs_none" else 1.0
        elif ours.score is not None and dense.score is not None:
            above[trace] += 100 * (dense.score - ours.score) if accepted else 0.0
            below[trace] += 1.0
    if not below:
        return spent(point, budget)
    return bootstrap(list(above.values()), list(below.values()), 2 * budget.confidence - 1)[1]


def _passed(measured: Measured, theta: float) -> list[bool]:
    return [r.ehat is None or r.ehat <= theta for r in measured.ours]


def _point(measured: Measured, theta: float) -> CurvePoint:
    passed = _passed(measured, theta)
    shared = sum(r.shared for r in measured.ours)
    kl = sum(r.kl for r, p in zip(measured.ours, passed, strict=True) if p) / len(passed)
    both = zip(measured.ours, measured.dense, passed, strict=True)
    scores = [(r.score if p else d.score, d.score) for r, d, p in both]
    judged = [(mine, dense) for mine, dense in scores if mine is not None and dense is not None]
    accuracy = fmean(mine for mine, _ in judged) if judged else None
    return CurvePoint(
        theta=theta,
        reuse=sum(r.reuse * r.shared for r, p in zip(measured.ours, passed, strict=True) if p) / shared,
        kl=kl,
        kl_vs_none=kl / fmean(r.kl for r in measured.none),
        accepted=fmean(passed),
        accuracy=accuracy,
        points=None if accuracy is None else 100 * (fmean(dense for _, dense in judged) - accuracy),
    )
