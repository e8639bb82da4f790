"""CacheBlend (arXiv 2405.16444): recompute the tokens whose keys deviate most, fewer from layer to layer."""

from dataclasses import dataclass
from math import ceil

from ..cases import Case, Outcome, rotated
from ..partial import partial_run
from .base import Untaught


@dataclass(frozen=True, slots=True)
class CacheBlend(Untaught):
    """Rotate; run all tokens through the first two layers, then go on with those of the largest Σ(K − K_old)².

    Layer 0 cannot tell tokens apart (its keys are exact after rotation), so layer 1 is the first that selects, as in
    published code; from each layer's deviations the next one's, fewer, are chosen. ``share`` is the mean over the
    layers behind. How fast it falls is not published; chosen: evenly, from 1.17 to 0.83 of it at 15%. Published for
    chunks that were prefilled alone; chosen: the source agent's cache, which is nearer and costs no prefill.
    """

    name: str = "cacheblend"
    share: float = 0.15

    def counts(self, layers: int, tokens: int) -> list[int]:
        """Tokens that each layer computes."""
        behind = max(layers - 2, 0)
        slope = 0.2 * (1 - self.share)
        falls = [1 - 2 * i / (behind - 1) if behind > 1 else 0.0 for i in range(behind)]
        shares = [self.share * (1 + slope * fall) for fall in falls]
        return [tokens] * min(layers, 2) + [min(tokens, ceil(share * tokens - 1e-9)) for share in shares]

    def apply(self, case: Case) -> Outcome:
        old = rotated(case)
        run = partial_run(case.model, case.prefix, case.run, old)
        for layer, count in enumerate(self.counts(old.k.shape[0], old.tokens)):
            if count < len(run.rows):
                deviation = (run.keys(layer - 1) - old.k[layer - 1])[run.rows].square().sum(1)
                run.keep(run.rows[deviation.topk(count).indices].sort().values)
            run.step(layer)
        return Outcome(run.active, recompute=run.share)
