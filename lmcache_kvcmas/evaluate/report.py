"""Rows made into figures: a summary for the JSON file, tables for the reader."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table

from .chain import MODES, ChainRow
from .measures import bootstrap, rank_correlation
from .run import Row


class Summary(msgspec.Struct, frozen=True, omit_defaults=False):
    """One method's means over contexts, and over edges where there are several."""

    kl: float
    kl_ci: list[float]
    """95%, bootstrap over contexts."""
    kl_vs_none: float
    """KL ÷ KL of rotation only: ratio of means on each edge, then the mean over edges."""
    kl_vs_none_ci: list[float]
    """95%, paired bootstrap over all rows."""
    top1: float
    exact: float
    kv_error: float
    res_k: float
    res_v: float
    ehat: float | None
    error_over_ehat: float | None
    """Mean of true error behind the head ÷ ê."""
    ehat_rank_correlation: float | None
    """Spearman's, of ê with the true error."""
    recompute: float
    """Recomputed tokens x layers ÷ those of the run."""
    state_bytes: float
    """Kept for the edge and a run, beyond the source's cache."""
    reference_prefills: float
    """Prefills of the context that only this method needs."""
    accepted: float
    """Share of transitions that its gate let pass; 1 where it has none."""
    accuracy: float | None = None
    """Of answers to a task; None where there is no task."""


class ChainSummary(msgspec.Struct, frozen=True):
    mode: str
    hop: int
    edge: str
    kl: float
    kl_ci: list[float]
    top1: float


def summarise(rows: Sequence[Row]) -> dict[str, Summary]:
    """A summary for each method. Rotation only (`none`) must be among the rows."""
    methods = dict.fromkeys(row.method for row in rows)
    none = {(r.edge, r.context): r for r in rows if r.method == "none"}
    return {method: _summary([r for r in rows if r.method == method], none) for method in methods}


def _summary(rows: Sequence[Row], none: dict[tuple[str, str], Row]) -> Summary:
    edges = list(dict.fromkeys(r.edge for r in rows))
    below = [none[r.edge, r.context] for r in rows]
    ratios = [_mean(rows, edge, "kl") / _mean(below, edge, "kl") for edge in edges]
    judged = [(r.tail_error, r.ehat) for r in rows if r.ehat and r.gate == "accepted"]
    return Summary(
        kl=fmean(r.kl for r in rows),
        kl_ci=bootstrap([r.kl for r in rows]),
        kl_vs_none=fmean(ratios),
        kl_vs_none_ci=bootstrap([r.kl for r in rows], [r.kl for r in below]),
        top1=fmean(r.top1 for r in rows),
        exact=fmean(r.exact for r in rows),
        kv_error=fmean(r.kv_error for r in rows),
        res_k=fmean(r.res_k for r in rows),
        res_v=fmean(r.res_v for r in rows),
        ehat=fmean(e for _, e in judged) if judged else None,
        error_over_ehat=fmean(t / e for t, e in judged) if judged else None,
        ehat_rank_correlation=rank_correlation(*zip(*judged, strict=True)) if len(judged) > 2 else None,
        recompute=fmean(r.recompute for r in rows),
        state_bytes=fmean(r.state_bytes for r in rows),
        reference_prefills=fmean(r.reference_prefills for r in rows),
        accepted=fmean(r.gate == "accepted" for r in rows),
    )


def _mean(rows: Iterable[Row], edge: str, field: str) -> float:
    return fmean(getattr(r, field) for r in rows if r.edge == edge)


def summarise_chain(rows: Sequence[ChainRow]) -> list[ChainSummary]:
    """Mode by mode and hop by hop."""
    summaries = []
    for mode in MODES:
        for hop in sorted({r.hop for r in rows}):
            some = [r for r in rows if (r.mode, r.hop) == (mode, hop)]
            kls = [r.kl for r in some]
            summaries.append(
                ChainSummary(mode, hop, some[0].edge, fmean(kls), bootstrap(kls), fmean(r.top1 for r in some))
            )
    return summaries


def document(model: str, settings: dict[str, Any], rows: Sequence[Row], chain: Sequence[ChainRow]) -> dict[str, Any]:
    """What ``--json`` writes."""
    edges = dict.fromkeys(r.edge for r in rows)
    whole: dict[str, Any] = {
        "model": model,
        "settings": settings,
        "summary": msgspec.to_builtins(summarise(rows)),
        "edges": {edge: msgspec.to_builtins(summarise([r for r in rows if r.edge == edge])) for edge in edges},
        "rows": [asdict(r) for r in rows],
    }
    if chain:
        whole["chain"] = {"summary": msgspec.to_builtins(summarise_chain(chain)), "rows": [asdict(r) for r in chain]}
    return whole


def tables(rows: Sequence[Row], chain: Sequence[ChainRow]) -> RenderableType:
    """For a terminal."""
    shown: list[RenderableType] = []
    edges = list(dict.fromkeys(r.edge for r in rows))
    for edge in edges:
        shown.append(_table(edge, [r for r in rows if r.edge == edge]))
    if len(edges) > 1:
        shown.append(_table(f"all {len(edges)} edges", rows))
    shown.append(
        "KL: 1e-3 nats to dense, over the teacher-forced tokens of dense's own answer; ÷ none: against rotation only, "
        "with its 95% interval. res K, V: share of the delta's energy that is left. "
        "ê: the error that the method itself expects; error ÷ ê: the true one against it. "
        "recomp.: tokens x layers that are recomputed ÷ those of the run; MiB: kept for the edge and a run, beyond the "
        "source's cache; refs: prefills of the context that only this method needs (oracle, graphflow, kamera: the "
        "pair was prefilled densely once before); acc.: share that the method's gate let pass, 1 without a gate; what "
        "it refuses is dense."
    )
    if chain:
        shown.append(_chain_table(summarise_chain(chain)))
    return Group(*shown)


def _table(title: str, rows: Sequence[Row]) -> Table:
    contexts = len({(r.edge, r.context) for r in rows})
    table = Table(title=f"{title} ({contexts} transitions)")
    columns: dict[str, Callable[[Summary], str]] = {
        "KL": lambda s: f"{1e3 * s.kl:.1f}",
        "÷ none": lambda s: f"{s.kl_vs_none:.2f} [{s.kl_vs_none_ci[0]:.2f}–{s.kl_vs_none_ci[1]:.2f}]",
        "top-1": lambda s: f"{s.top1:.3f}",
        "exact": lambda s: f"{s.exact:.2f}",
        "KV error": lambda s: f"{s.kv_error:.4f}",
        "res K": lambda s: f"{s.res_k:.2f}",
        "res V": lambda s: f"{s.res_v:.2f}",
        "ê": lambda s: "" if s.ehat is None else f"{s.ehat:.4f}",
        "error ÷ ê": lambda s: "" if s.error_over_ehat is None else f"{s.error_over_ehat:.2f}",
        "recomp.": lambda s: f"{s.recompute:.2f}",
        "MiB": lambda s: f"{s.state_bytes / 2**20:.1f}",
        "refs": lambda s: f"{s.reference_prefills:.0f}",
        "acc.": lambda s: f"{s.accepted:.2f}",
    }
    table.add_column("method")
    for name in columns:
        table.add_column(name, justify="right")
    for method, summary in summarise(rows).items():
        table.add_row(method, *(show(summary) for show in columns.values()))
    return table


def _chain_table(summaries: Sequence[ChainSummary]) -> Table:
    hops = sorted({s.hop for s in summaries})
    table = Table(title="chain: KL to dense (1e-3 nats) hop by hop, gate off")
    table.add_column("mode")
    for hop in hops:
        table.add_column(next(f"{hop}: {s.edge}" for s in summaries if s.hop == hop), justify="right")
    for mode in dict.fromkeys(s.mode for s in summaries):
        table.add_row(mode, *(f"{1e3 * s.kl:.1f}" for s in summaries if s.mode == mode))
    return table
