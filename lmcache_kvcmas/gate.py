"""Whether a predicted correction may be trusted (design, section 3.6)."""

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from .choose import except_rows
from .config import Settings
from .predict.base import LayerPrediction

DEFAULT_THETA = Settings().theta
"""Measured on SmolLM2-135M-Instruct: accepts about three quarters of its transitions. A model has its own."""


class Reason(Enum):
    """Why a prediction was accepted or not."""

    ACCEPTED = "accepted"
    FEW_ANCHORS = "few_anchors"
    UNRELIABLE = "unreliable"
    """ê of this hop is above θ."""
    CHAIN = "chain"
    """The errors of the hops so far, this one included, add up to too much."""
    NOT_FINITE = "not_finite"


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gate said about one hop."""

    accepted: bool
    reason: Reason
    ehat: float
    chain_error2: float
    """Σ ê² along the chain, this hop included."""


class Reliability:
    """Gathers, over a run's layers, what ê is made of.

    ``ê² = mean over layers >= 1 and K, V of Σ_t spread_t / Σ_t ‖B_t‖²``, over the tokens that are not recomputed.
    """

    def __init__(self, layers: int, tokens: int, device: torch.device | str = "cpu") -> None:
        self.terms = torch.zeros(layers, 2, 2, tokens, device=device)
        """fp32 ``[L, 2 (K, V), 2 (spread, energy), T]``. Ranks that share the heads add theirs up, in place."""

    def add(self, layer: int, prediction: LayerPrediction, k: Tensor, v: Tensor) -> None:
        """Add a layer's prediction for base rows ``k, v [T, C]``."""
        if prediction.spread_k is None or prediction.spread_v is None:
            return
        for terms, spread, base in zip(
            self.terms[layer], (prediction.spread_k, prediction.spread_v), (k, v), strict=True
        ):
            terms[0] = spread
            terms[1] = base.float().square().sum(1)

    def doubts(self) -> Tensor:
        """fp32 ``[T]``: what each token adds to ê²."""
        energy = self.terms[:, :, 1].sum(2)
        judged = energy != 0  # not a number is a doubt
        doubts: Tensor = (self.terms[:, :, 0][judged] / energy[judged][:, None]).sum(0)
        return doubts

    def sums(self, computed: Tensor | None = None) -> Tensor:
        """fp32 ``[L, 2 (K, V), 2 (spread, energy)]`` of all rows but ``computed``."""
        if computed is None:
            return self.terms.sum(3)
        return self.terms[..., except_rows(self.terms.shape[3], computed, self.terms.device)].sum(3)

    def ehat(self, computed: Tensor | None = None) -> float:
        return ehat_of(self.sums(computed))


def ehat_of(sums: Tensor) -> float:
    """ê of ``Reliability.sums()``; 0 when nothing was predicted, or all of it is recomputed."""
    spread, energy = sums[..., 0].double().cpu(), sums[..., 1].double().cpu()
    judged = energy != 0  # what is not a number must not pass for nothing
    if not bool(judged.any()):
        return 0.0
    return math.sqrt(float((spread[judged] / energy[judged]).mean()))


def decide(
    ehat: float,
    chain_error2: float = 0.0,
    *,
    theta: float = DEFAULT_THETA,
    chain_theta: float | None = None,
    anchors: int,
    min_anchors: int = 2,
) -> Decision:
    """Judge one hop: ``ehat`` is its own, ``chain_error2`` is Σ ê² of the hops before it.

    Accepts if ê ≤ θ, sqrt(Σ ê²) ≤ ``chain_theta`` (2θ by default) and the pool holds ``min_anchors``.
    """
    limit = 2 * theta if chain_theta is None else chain_theta
    total = chain_error2 + ehat * ehat
    if anchors < min_anchors:
        reason = Reason.FEW_ANCHORS
    elif not math.isfinite(total):
        reason = Reason.NOT_FINITE
    elif ehat > theta:
        reason = Reason.UNRELIABLE
    elif math.sqrt(total) > limit:
        reason = Reason.CHAIN
    else:
        reason = Reason.ACCEPTED
    return Decision(reason is Reason.ACCEPTED, reason, ehat, total)
