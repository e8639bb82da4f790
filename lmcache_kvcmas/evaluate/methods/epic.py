"""EPIC with LegoLink (arXiv 2410.15332): recompute the first tokens of each chunk."""

from dataclasses import dataclass

import torch

from ..cases import Case, Outcome, rotated
from ..partial import partial_run
from .base import Untaught


@dataclass(frozen=True, slots=True)
class Epic(Untaught):
    """Rotate; the first ``k`` tokens of every chunk go through all layers.

    Chosen: k = 32 and chunks of 256 tokens. Published for chunks that were prefilled alone; chosen: the source agent's
    cache, in which chunks have seen one another, which is nearer and costs no prefill.
    """

    name: str = "epic"
    k: int = 32
    chunk: int = 256

    def apply(self, case: Case) -> Outcome:
        run = partial_run(case.model, case.prefix, case.run, rotated(case))
        rows = torch.arange(len(case.run))
        run.begin(rows[rows % self.chunk < self.k])
        for layer in range(case.source.k.shape[0]):
            run.step(layer)
        return Outcome(run.active, recompute=run.share)
