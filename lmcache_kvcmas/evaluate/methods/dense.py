"""Full prefill: no reuse at all."""

from dataclasses import dataclass

from ..cases import Case, Outcome
from .base import Untaught


@dataclass(frozen=True, slots=True)
class Dense(Untaught):
    """What everything is compared with; its row shows what the comparison's rounding amounts to."""

    name: str = "dense"

    def apply(self, case: Case) -> Outcome:
        return Outcome(case.fallback, recompute=1.0)
