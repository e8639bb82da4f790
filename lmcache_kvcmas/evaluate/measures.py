"""How far a cache, and what a model says on top of it, are from dense."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..choose import except_rows
from .dense import Active
from .figures import Interval

_RESAMPLES = 2000


class CacheErrors(NamedTuple):
    """Errors of a run's cache. Each is a mean over layers >= 1; rotation changes no length, so rotated keys do."""

    res_k: float
    """Residual delta energy: ‖K − K_dense‖² ÷ ‖K_none − K_dense‖², 1 for rotation only."""
    res_v: float
    kv_error: float
    """Relative error: sqrt of the mean over layers and K, V of ‖err‖² ÷ ‖dense‖²."""
    tail_error: float
    """The same, for the tokens that were not recomputed: what ê estimates."""


class AnswerErrors(NamedTuple):
    kl: float
    """Mean KL(dense ‖ this), nats, over the teacher-forced tokens."""
    top1: float
    """Share of them at which both would choose the same token."""
    exact: bool
    """Whether both would choose the same token everywhere."""


def cache_errors(run: Active, none: Active, dense: Active, computed: Tensor | None = None) -> CacheErrors:
    """Compare ``run`` with ``dense``; ``none`` is the run under rotation only, ``computed`` what ê leaves out."""
    error = torch.stack([_energy(run.k - dense.k), _energy(run.v - dense.v)])
    delta = torch.stack([_energy(none.k - dense.k), _energy(none.v - dense.v)])
    whole = torch.stack([_energy(dense.k), _energy(dense.v)])
    res = (error.sum(2) / delta.sum(2).clamp_min(1e-30)).mean(1)
    left = except_rows(run.tokens, computed)
    tails = error[..., left].sum(2) / whole[..., left].sum(2).clamp_min(1e-30)
    return CacheErrors(
        float(res[0]),
        float(res[1]),
        float((error.sum(2) / whole.sum(2)).mean().sqrt()),
        float(tails.mean().sqrt()),
    )


def _energy(x: Tensor) -> Tensor:
    """``[L-1, T]`` of ``x [L, T, C]``: layer 0 is never corrected."""
    return x[1:].double().square().sum(2)


def answer_errors(logp: Tensor, dense: Tensor) -> AnswerErrors:
    """Compare log-probabilities ``[n, V]`` with dense ones."""
    kl = (dense.exp() * (dense - logp)).double().sum(1).mean()
    same = logp.argmax(1) == dense.argmax(1)
    # Never below 0 but for rounding, where the two are the same.
    return AnswerErrors(max(float(kl), 0.0), float(same.double().mean()), bool(same.all()))


def bootstrap(values: Sequence[float], below: Sequence[float] | None = None, level: float = 0.95) -> Interval:
    """Interval of the mean of ``values``, or of the ratio of means to ``below`` (paired); of 95% by default."""
    x = torch.tensor(values, dtype=torch.float64)
    draws = torch.randint(len(x), (_RESAMPLES, len(x)), generator=torch.Generator().manual_seed(0))
    means = x[draws].mean(1)
    if below is not None:
        means = means / torch.tensor(below, dtype=torch.float64)[draws].mean(1)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(means, ends).tolist()
    return low, high


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, for values without ties."""
    ranks = torch.stack([torch.tensor(x, dtype=torch.float64).argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])
