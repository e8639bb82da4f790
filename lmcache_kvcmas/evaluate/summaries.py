"""Rows made into figures: means with intervals for each method, and which differences are more than chance."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from statistics import fmean
from typing import TypeVar

from .chain import MODES, ChainRow
from .figures import Better, ChainHop, Hop, Summary
from .measures import bootstrap, rank_correlation
from .run import Row
from .serve import TraceRow

OURS = "attention+"
"""What the names of the product's own methods begin with."""

R = TypeVar("R", Row, TraceRow)


def summarise(rows: Sequence[Row]) -> dict[str, Summary]:
    """A summary for each method. Rotation only (`none`) must be among the rows."""
    none = {(r.edge, r.context): r for r in rows if r.method == "none"}
    return {method: _of_edges(some, none) for method, some in _by_method(rows).items()}


def _of_edges(rows: Sequence[Row], none: dict[tuple[str, str], Row]) -> Summary:
    edges = list(dict.fromkeys(r.edge for r in rows))
    below = [none[r.edge, r.context] for r in rows]
    ratios = [_mean(rows, edge) / _mean(below, edge) for edge in edges]
    judged = [(r.tail_error, r.ehat) for r in rows if r.ehat and r.gate == "accepted"]
    return Summary(
        kl=fmean(r.kl for r in rows),
        kl_ci=bootstrap([r.kl for r in rows]),
        kl_vs_none=fmean(ratios),
        kl_vs_none_ci=bootstrap([r.kl for r in rows], [r.kl for r in below]),
        top1=fmean(r.top1 for r in rows),
        exact=fmean(r.exact for r in rows),
        recompute=fmean(r.recompute for r in rows),
        state_bytes=fmean(r.state_bytes for r in rows),
        reference_prefills=fmean(r.reference_prefills for r in rows),
        accepted=fmean(r.gate == "accepted" for r in rows),
        seconds=fmean(r.seconds for r in rows),
        reuse=1 - fmean(r.recompute for r in rows),
        kv_error=fmean(r.kv_error for r in rows),
        res_k=fmean(r.res_k for r in rows),
        res_v=fmean(r.res_v for r in rows),
        ehat=fmean(e for _, e in judged) if judged else None,
        error_over_ehat=fmean(t / e for t, e in judged) if judged else None,
        ehat_rank_correlation=rank_correlation(*zip(*judged, strict=True)) if len(judged) > 1 else None,
    )


def summarise_traces(rows: Sequence[TraceRow]) -> dict[str, Summary]:
    """A summary for each method; intervals over whole traces, whose hops are not independent of one another."""
    none = _by_trace([r for r in rows if r.method == "none"], lambda r: r.kl)
    return {method: _of_traces(some, none) for method, some in _by_method(rows).items()}


def _of_traces(rows: Sequence[TraceRow], none: dict[str, float]) -> Summary:
    kl, shared = _by_trace(rows, lambda r: r.kl), sum(r.shared for r in rows)
    scores = list(_by_trace([r for r in rows if r.score is not None], lambda r: r.score or 0.0).values())
    judged = [r.ehat for r in rows if r.ehat is not None]
    return Summary(
        kl=fmean(kl.values()),
        kl_ci=bootstrap(list(kl.values())),
        kl_vs_none=fmean(kl.values()) / fmean(none.values()),
        kl_vs_none_ci=bootstrap(list(kl.values()), list(none.values())),
        top1=fmean(r.top1 for r in rows),
        exact=fmean(r.exact for r in rows),
        recompute=sum(r.recompute * r.shared for r in rows) / shared,
        state_bytes=fmean(r.state_bytes for r in rows),
        reference_prefills=fmean(r.reference_prefills for r in rows),
        accepted=fmean(r.accepted for r in rows),
        seconds=fmean(r.seconds for r in rows),
        reuse=sum(r.reuse * r.shared for r in rows) / shared,
        ehat=fmean(judged) if judged else None,
        accuracy=fmean(scores) if scores else None,
        accuracy_ci=bootstrap(scores) if scores else None,
    )


def summarise_hops(rows: Sequence[TraceRow]) -> list[Hop]:
    """Method by method and hop by hop."""
    none = {hop: fmean(r.kl for r in rows if (r.method, r.hop) == ("none", hop)) for hop in {r.hop for r in rows}}
    return [
        Hop(
            method=method,
            hop=hop,
            kl=fmean(r.kl for r in here),
            kl_ci=bootstrap([r.kl for r in here]),
            kl_vs_none=fmean(r.kl for r in here) / none[hop],
            top1=fmean(r.top1 for r in here),
            exact=fmean(r.exact for r in here),
        )
        for method, some in _by_method(rows).items()
        for hop in sorted(none)
        if (here := [r for r in some if r.hop == hop])
    ]


def summarise_chain(rows: Sequence[ChainRow]) -> list[ChainHop]:
    """Mode by mode and hop by hop."""
    summaries = []
    for mode in MODES:
        for hop in sorted({r.hop for r in rows}):
            some = [r for r in rows if (r.mode, r.hop) == (mode, hop)]
            kls = [r.kl for r in some]
            summaries.append(ChainHop(mode, hop, some[0].edge, fmean(kls), bootstrap(kls), fmean(r.top1 for r in some)))
    return summaries


def better_edges(rows: Sequence[Row]) -> list[Better]:
    """Where one of ours, or another beside one of ours, has the lower KL, and the interval leaves no doubt."""
    measured = {m: {f"{r.edge} {r.context}": r.kl for r in some} for m, some in _by_method(rows).items()}
    return list(_compared(None, "kl", measured))


def better_traces(workload: str, rows: Sequence[TraceRow]) -> list[Better]:
    """The same for a workload's traces, of KL and of accuracy."""
    kls = {m: _by_trace(some, lambda r: r.kl) for m, some in _by_method(rows).items()}
    scored = [r for r in rows if r.score is not None]
    scores = {m: _by_trace(some, lambda r: r.score or 0.0) for m, some in _by_method(scored).items()}
    return [*_compared(workload, "kl", kls), *_compared(workload, "accuracy", scores)]


def _compared(workload: str | None, measure: str, values: dict[str, dict[str, float]]) -> Iterator[Better]:
    """Each of ours against each other method, the better one first. KL is better below, accuracy above."""
    sign = -1 if measure == "kl" else 1
    ours = [m for m in values if m.startswith(OURS)]
    for mine in ours:
        for other in (m for m in values if m not in ours or m > mine):
            differences = [values[mine][unit] - values[other][unit] for unit in values[mine]]
            low, high = bootstrap(differences)
            if low <= 0 <= high:
                continue
            mean = fmean(differences)
            if sign * mean > 0:
                yield Better(mine, other, measure, mean, (low, high), workload)
            else:
                yield Better(other, mine, measure, -mean, (-high, -low), workload)


def _by_method(rows: Iterable[R]) -> dict[str, list[R]]:
    methods: dict[str, list[R]] = {}
    for row in rows:
        methods.setdefault(row.method, []).append(row)
    return methods


def _by_trace(rows: Iterable[TraceRow], value: Callable[[TraceRow], float]) -> dict[str, float]:
    """The mean of each trace's hops; samples of one trace belong together."""
    ordered = sorted(rows, key=lambda r: r.trace)
    return {trace: fmean(value(r) for r in some) for trace, some in groupby(ordered, lambda r: r.trace)}


def _mean(rows: Iterable[Row], edge: str) -> float:
    return fmean(r.kl for r in rows if r.edge == edge)
