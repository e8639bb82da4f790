"""Rows of an evaluation, as the tests ask for them."""

from dataclasses import dataclass

from lmcache_kvcmas.evaluate.run import Row

EDGES = (("planner", "solver"), ("solver", "critic"), ("critic", "reflector"))


@dataclass(frozen=True)
class Measured:
    """Rows of one evaluation."""

    rows: list[Row]

    def of(self, method: str, edge: str | None = None) -> list[Row]:
        return [r for r in self.rows if r.method == method and edge in (None, r.edge)]

    def kl(self, method: str, edge: str | None = None) -> float:
        return self.mean(method, "kl", edge)

    def mean(self, method: str, field: str, edge: str | None = None) -> float:
        some = self.of(method, edge)
        return sum(getattr(r, field) for r in some) / len(some)

    def ratio(self, method: str) -> float:
        """KL ÷ rotation only on each edge, then the mean over the edges."""
        edges = [f"{a}:{b}" for a, b in EDGES]
        return sum(self.kl(method, e) / self.kl("none", e) for e in edges) / len(edges)
