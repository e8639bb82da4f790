"""The product's default as it is served: with its gate."""

from dataclasses import dataclass, replace

from ...gate import DEFAULT_THETA, decide
from ..cases import Case, Examples, Outcome, refused
from .predicted import Predicted


@dataclass(frozen=True, slots=True)
class Gated:
    """A prediction, dense where ê is above θ or the pool holds fewer than two anchors. θ belongs to a model."""

    name: str
    inner: Predicted
    theta: float = DEFAULT_THETA
    anchors: int = 0

    def learned(self, examples: Examples) -> "Gated":
        return replace(self, inner=self.inner.learned(examples), anchors=len(examples.pool))

    def apply(self, case: Case) -> Outcome:
        outcome = self.inner.apply(case)
        if decide(outcome.ehat or 0.0, case.error2, theta=self.theta, anchors=self.anchors).accepted:
            return outcome
        return refused(case, outcome.state_bytes, ehat=outcome.ehat)
