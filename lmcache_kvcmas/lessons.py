"""What one finished request teaches: its runs' deltas, and an anchor for each edge that was prefilled densely."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmcache_kvcmas.anchors import Anchor, Caches, kept_rows
from lmcache_kvcmas.factors import Factors
from lmcache_kvcmas.hot import HotRun
from lmcache_kvcmas.kernels.correct import release
from lmcache_kvcmas.kernels.rope import RopeTable
from lmcache_kvcmas.sources import Source


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Consecutive sources that together cover a stretch of a prompt."""

    sources: Sequence[Source]

    def free(self, rope: RopeTable, layer: int) -> tuple[Tensor, Tensor]:
        """Position-free keys and values of one layer, deltas added, fp32 ``[T, C]``."""
        parts = [s.free(rope, layer) for s in self.sources]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.sources)


def free_of(run: HotRun, rope: RopeTable, layer: int) -> tuple[Tensor, Tensor]:
    """Position-free keys and values of one layer of a captured run, fp32 ``[T, C]``."""
    cos, sin = rope.span(run.position, run.position + run.k.shape[1])
    return release(rope, run.k[layer], cos, sin), run.v[layer].float()


def delta_factors(run: HotRun, roots: Stretch, rope: RopeTable, rank: int) -> tuple[Factors, Factors]:
    """Rank-``rank`` difference of a captured run to its full-width roots, keys position-free, in the run's dtype.

    One layer at a time: a run of 32K tokens at full width in fp32, all layers at once, would not fit beside a model.
    """
    layers: tuple[list[Factors], list[Factors]] = ([], [])
    for layer in range(run.k.shape[0]):
        pairs = zip(free_of(run, rope, layer), roots.free(rope, layer), strict=True)
        for to, (ours, theirs) in zip(layers, pairs, strict=True):
            to.append(Factors.of((ours - theirs)[None], rank, run.k.dtype))
    return _stacked(layers[0]), _stacked(layers[1])


def anchor_of(run: HotRun, source: Stretch, rope: RopeTable, rank: int, keep: int, offset: int) -> Anchor:
    """The anchor of a densely prefilled run, whose first token stands ``offset`` tokens into its slot."""
    rows = kept_rows(run.k.shape[1], keep)
    picked = rows.to(run.k.device)
    kept: list[list[Tensor]] = [[], [], [], []]
    for layer in range(run.k.shape[0]):
        k, v = (x[picked] for x in source.free(rope, layer))
        ours_k, ours_v = (x[picked] for x in free_of(run, rope, layer))
        for to, x in zip(kept, (k, v, ours_k - k, ours_v - v), strict=True):
            to.append(x)
    base_k, base_v, delta_k, delta_v = (torch.stack(x) for x in kept)
    return Anchor.of_rows(Caches(base_k, base_v), Caches(delta_k, delta_v), rows + offset, rank)


def _stacked(layers: list[Factors]) -> Factors:
    u = torch.cat([f.u for f in layers])
    return Factors(u, None if layers[0].v is None else torch.cat([f.v for f in layers if f.v is not None]))
