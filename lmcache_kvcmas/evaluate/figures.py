"""What is said about a method: the figures that commands compute, that JSON files hold, and that reports show."""

from typing import Annotated

import msgspec

Interval = tuple[float, float]
"""95%: low, high."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Summary(msgspec.Struct, frozen=True):
    """One method's means over transitions; over edges, and over traces, of these."""

    kl: float
    kl_ci: Interval
    """95%, bootstrap over contexts; over whole traces, where there are any."""
    kl_vs_none: float
    """KL ÷ KL of rotation only: ratio of means on each edge, then the mean over edges."""
    kl_vs_none_ci: Interval
    """95%, paired bootstrap."""
    top1: Share
    exact: Share
    recompute: float
    """Recomputed tokens x layers ÷ those of what was shared."""
    state_bytes: float
    """Kept for the edge and a run, beyond the source's cache."""
    reference_prefills: float = 0.0
    """Prefills of the context that only this method needs."""
    accepted: Share = 1.0
    """Share of transitions that its gate let pass; 1 where it has none."""
    seconds: float | None = None
    """In the method, a call."""
    reuse: float | None = None
    """Shared tokens that were neither recomputed nor refused ÷ all of them."""
    kv_error: float | None = None
    res_k: float | None = None
    res_v: float | None = None
    ehat: float | None = None
    error_over_ehat: float | None = None
    """Mean of true error of what was not recomputed ÷ ê."""
    ehat_rank_correlation: float | None = None
    """Spearman's, of ê with the true error."""
    accuracy: Share | None = None
    """Of answers to a task; None where there is no task."""
    accuracy_ci: Interval | None = None


class ChainHop(msgspec.Struct, frozen=True):
    """One mode at one hop of a chain."""

    mode: str
    hop: int
    edge: str
    kl: float
    kl_ci: Interval
    top1: float | None = None


class Hop(msgspec.Struct, frozen=True):
    """One method at one hop of a workload's traces."""

    method: str
    hop: int
    kl: float
    kl_ci: Interval
    kl_vs_none: float | None = None
    top1: float | None = None
    exact: float | None = None


class Better(msgspec.Struct, frozen=True):
    """A paired difference, ``method`` less ``than``, whose interval excludes 0."""

    method: str
    than: str
    measure: str
    """``kl`` or ``accuracy``."""
    difference: float
    ci: Interval
    workload: str | None = None
    """None: the edges."""


class CurvePoint(msgspec.Struct, frozen=True):
    """What a θ comes to."""

    theta: float
    reuse: float
    """Shared tokens that were neither recomputed nor refused ÷ all of them."""
    kl: float
    kl_vs_none: float | None = None
    accepted: float | None = None
    """Share of calls whose takeover passed."""
    accuracy: float | None = None
    points: float | None = None
    """Percentage points of accuracy lost to dense prefill."""
    at_most: float | None = None
    """Of the budget's measure: what as large a share of resampled traces as was asked for stays below."""


class HeldOut(msgspec.Struct, frozen=True):
    """The chosen θ on traces that had no part in choosing it, with the gate really in the way."""

    reuse: float
    kl: float
    within_budget: bool
    kl_ci: Interval | None = None
    kl_vs_none: float | None = None
    accepted: float | None = None
    accuracy: float | None = None
    points: float | None = None


class Variant(msgspec.Struct, frozen=True):
    """One value of an ablated setting."""

    value: str
    kl_vs_none: float
    kl_vs_none_ci: Interval
    default: bool = False
    recompute: float | None = None
    state_bytes: float | None = None
    seconds: float | None = None
