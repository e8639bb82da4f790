"""RelayCaching (arXiv 2603.13289): recompute few tokens, in the layers that deviate, and a short suffix."""

from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from ..cases import Case, Examples, Outcome, rotated
from ..partial import partial_run


@dataclass(frozen=True, slots=True)
class RelayCaching:
    """All tokens through two layers; those that deviate or matter through the range that deviates; the suffix through
    all layers.

    Published, as summaries tell it: deviations sit in a limited range of layers and few tokens, which deviation and
    influence pick out. Not known and chosen: deviation is Σ(K − K_old)² at layer 1 (10% of the tokens), influence the
    attention that the suffix pays a token there (another 5%), the suffix 16 tokens, the range the half of the layers,
    contiguous, with the largest relative delta on anchor contexts. A token needs its hidden states, so it is computed
    from layer 0 to the range's end. Published for caches that decoding left; here the source's cache stands for them.
    """

    name: str = "relaycaching"
    deviating: float = 0.10
    influential: float = 0.05
    suffix: int = 16
    layers: float = 0.5
    end: int | None = None
    """Layers below it recompute the chosen tokens."""

    def learned(self, examples: Examples) -> "RelayCaching":
        if not examples.cases:
            return replace(self, end=0)
        per_layer = torch.zeros(examples.cases[0].source.k.shape[0])
        for case in examples.cases:
            target = case.model.release(case.dense, case.prefix.tokens)
            for a, b in zip(case.source, target, strict=True):
                per_layer += (b - a).square().sum((1, 2)) / b.square().sum((1, 2))
        width = ceil(len(per_layer) * self.layers)
        return replace(self, end=int(per_layer.unfold(0, width, 1).sum(1).argmax()) + width)

    def apply(self, case: Case) -> Outcome:
        if self.end is None:
            raise RuntimeError("relaycaching finds its layers on an edge's anchor contexts first")
        old = rotated(case)
        layers, tokens = old.k.shape[0], old.tokens
        run = partial_run(case.model, case.prefix, case.run, old)
        run.step(0)
        weights = run.step(1, watch=True)
        assert weights is not None
        last = torch.arange(max(0, tokens - self.suffix), tokens)
        influence = weights[:, last].mean((0, 1)) if len(last) else torch.zeros(tokens)
        chosen = self._choose((run.keys(1) - old.k[1]).square().sum(1), influence)
        either = torch.zeros(tokens, dtype=torch.bool)
        either[last] = True
        if self.end > 2:
            either[chosen] = True
        run.keep(either.nonzero().flatten())
        for layer in range(2, layers):
            if layer == self.end:
                run.keep(last)
            run.step(layer)
        return Outcome(run.active, recompute=run.share)

    def _choose(self, deviation: Tensor, influence: Tensor) -> Tensor:
        tokens = len(deviation)
        first = deviation.topk(ceil(self.deviating * tokens)).indices
        rest = influence.index_fill(0, first, -1.0)
        second = rest.topk(min(ceil(self.influential * tokens), tokens - len(first))).indices
        return torch.cat([first, second])
