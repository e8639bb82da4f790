"""Ways to fill an edge's pool: which of many examples it keeps, and whether one pool serves all sorts of text."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ...predict import build_predictor
from ..cases import Case, Examples, Outcome, pool_of
from .base import Method

POLICIES = ("mass", "oldest", "published", "newest")


@dataclass(frozen=True, slots=True)
class Evicting:
    """A pool that examples come to one after another, and that has room for ``capacity`` of them.

    ``mass``, the product's: the one that predictions used least goes, merit halved at each eviction. ``oldest``: first
    in, first out. ``published`` (KVCMAS, KVComm): the least activated of the five oldest. ``newest``: what came first
    stays. The newest example is never the one to go, but with ``newest``.
    """

    name: str
    inner: Method
    policy: str
    capacity: int = 5

    def learned(self, examples: Examples) -> "Evicting":
        kept: list[Case] = []
        mass: list[float] = []
        for case in examples.cases:
            if kept:
                mass = [m + new for m, new in zip(mass, _mass(kept, case), strict=True)]
            if len(kept) >= self.capacity:
                if self.policy == "newest":
                    continue
                among = {"mass": len(kept), "oldest": 1, "published": min(5, len(kept))}[self.policy]
                worst = min(range(among), key=mass.__getitem__)
                del kept[worst], mass[worst]
                mass = [m / 2 for m in mass] if self.policy == "mass" else mass
            kept.append(case)
            mass.append(0.0)
        return replace(self, inner=self.inner.learned(Examples(tuple(kept), examples.rank, examples.keep)))

    def apply(self, case: Case) -> Outcome:
        return self.inner.apply(case)


@dataclass(frozen=True, slots=True)
class PerKind:
    """A pool for each kind of text, of at most ``capacity`` examples. A kind that was never seen has no anchors."""

    name: str
    inner: Method
    capacity: int = 5
    of_kind: Mapping[str, Method] = field(default_factory=dict)

    def learned(self, examples: Examples) -> "PerKind":
        kinds: dict[str, list[Case]] = {}
        for case in examples.cases:
            kinds.setdefault(case.kind, []).append(case)
        pools = {kind: Examples(tuple(some[: self.capacity]), examples.rank) for kind, some in kinds.items()}
        taught = {kind: self.inner.learned(pool) for kind, pool in pools.items()}
        return replace(self, inner=self.inner.learned(Examples(())), of_kind=taught)

    def apply(self, case: Case) -> Outcome:
        return self.of_kind.get(case.kind, self.inner).apply(case)


def _mass(kept: list[Case], case: Case) -> list[float]:
    """Each anchor's share of the weights when the pool predicts ``case``, mean over layers."""
    predictor = build_predictor("attention", pool_of(kept))
    masses = [predictor.layer(i, k, v, case.offsets).mass for i, (k, v) in enumerate(zip(*case.source, strict=True))]
    return [float(m) for m in torch.stack([m for m in masses if m is not None]).mean(0)]
