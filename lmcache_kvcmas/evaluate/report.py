"""Figures for a terminal."""

from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table

from .chain import ChainRow
from .figures import ChainHop, Interval, Summary, Variant
from .run import Row
from .serve import TraceRow
from .summaries import summarise, summarise_chain, summarise_traces

_LEGEND = (
    "KL: 1e-3 nats to dense, over the teacher-forced tokens of dense's own answer; ÷ none: against rotation only, with "
    "its 95% interval. recomp.: tokens x layers that are recomputed ÷ those that were shared; MiB: kept for the edge "
    "and a run, beyond the source's cache; refs: prefills of the context that only it needs (oracle, graphflow, "
    "kamera: the pair was prefilled densely once before); passed: share that the method's gate let pass, 1 without a "
    "gate; what it refuses is dense. "
)
_EDGE_LEGEND = (
    "res K, V: share of the delta's energy that is left. ê: the error that the method itself expects; error ÷ ê: the "
    "true one against it."
)
_TRACE_LEGEND = (
    "All methods read dense's own answers, each over the cache that it had itself. accuracy: of the last answer, which "
    "is each method's own."
)

_NARROW = 120
"""Columns of a terminal below which a table is cut to what matters most."""
_SHORT = ("KL", "÷ none", "accuracy", "recomp.", "MiB")

Columns = Mapping[str, Callable[[Summary], str]]

_ANSWERS: Columns = {
    "KL": lambda s: f"{1e3 * s.kl:.1f}",
    "÷ none": lambda s: f"{s.kl_vs_none:.2f} {_interval(s.kl_vs_none_ci)}",
    "top-1": lambda s: f"{s.top1:.3f}",
    "exact": lambda s: f"{s.exact:.2f}",
}
_COSTS: Columns = {
    "recomp.": lambda s: f"{s.recompute:.2f}",
    "MiB": lambda s: f"{s.state_bytes / 2**20:.1f}",
    "refs": lambda s: f"{s.reference_prefills:.0f}",
    "passed": lambda s: f"{s.accepted:.2f}",
}
_EDGES: Columns = {
    **_ANSWERS,
    "KV error": lambda s: _figure(s.kv_error, 4),
    "res K": lambda s: _figure(s.res_k, 2),
    "res V": lambda s: _figure(s.res_v, 2),
    "ê": lambda s: _figure(s.ehat, 4),
    "error ÷ ê": lambda s: _figure(s.error_over_ehat, 2),
    **_COSTS,
}
_TRACES: Columns = {
    **_ANSWERS,
    "accuracy": lambda s: _figure(s.accuracy, 2),
    "95%": lambda s: "" if s.accuracy_ci is None else _interval(s.accuracy_ci),
    **_COSTS,
    "seconds": lambda s: _figure(s.seconds, 2),
}


def tables(
    rows: Sequence[Row], chain: Sequence[ChainRow], traces: Sequence[TraceRow] = (), width: int = 200
) -> RenderableType:
    """A table for each edge, for all of them, for the chain and for each workload, for a terminal of ``width``."""
    shown: list[RenderableType] = []
    edges = list(dict.fromkeys(r.edge for r in rows))
    for edge in edges:
        some = [r for r in rows if r.edge == edge]
        shown.append(_table(f"{edge} ({len({r.context for r in some})} transitions)", summarise(some), _EDGES, width))
    if len(edges) > 1:
        shown.append(_table(f"all {len(edges)} edges", summarise(rows), _EDGES, width))
    for name in dict.fromkeys(r.workload for r in traces):
        here = [r for r in traces if r.workload == name]
        title = f"{name} ({len({r.trace for r in here})} traces)"
        shown.append(_table(title, summarise_traces(here), _TRACES, width))
    if shown:
        shown.append(_LEGEND + (_EDGE_LEGEND if rows else "") + (_TRACE_LEGEND if traces else ""))
        if width < _NARROW:
            shown.append(f"A terminal of {_NARROW} columns shows more; --json has all.")
    if chain:
        shown.append(_chain_table(summarise_chain(chain)))
    return Group(*shown)


def ablation_tables(ablations: Mapping[str, Sequence[Variant]]) -> RenderableType:
    """A table for each axis; the product's default is marked."""
    shown: list[RenderableType] = []
    for axis, some in ablations.items():
        table = Table(title=axis, box=SIMPLE, pad_edge=False)
        for column in ("value", "KL ÷ none", "recomp.", "MiB", "seconds"):
            table.add_column(column, justify="left" if column == "value" else "right")
        for a in some:
            ratio = f"{a.kl_vs_none:.3f} [{a.kl_vs_none_ci[0]:.3f}–{a.kl_vs_none_ci[1]:.3f}]"
            mib = None if a.state_bytes is None else a.state_bytes / 2**20
            cells = (ratio, _figure(a.recompute, 2), _figure(mib, 2), _figure(a.seconds, 2))
            table.add_row(a.value, *cells, style="bold green" if a.default else None)
        shown.append(table)
    shown.append(
        "One setting changed at a time; the default in bold. KL ÷ rotation only: mean of the edges, 95% interval."
    )
    return Group(*shown)


def _table(title: str, summaries: Mapping[str, Summary], columns: Columns, width: int) -> Table:
    table = Table(title=title, box=SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("method", no_wrap=True)
    chosen = {name: show for name, show in columns.items() if width >= _NARROW or name in _SHORT}
    if all(s.accuracy is None for s in summaries.values()):
        chosen = {name: show for name, show in chosen.items() if name not in ("accuracy", "95%")}
    for name in chosen:
        table.add_column(name, justify="right", no_wrap=True)
    for method, summary in summaries.items():
        table.add_row(method, *(show(summary) for show in chosen.values()))
    return table


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _interval(ci: Interval) -> str:
    return f"[{ci[0]:.2f}–{ci[1]:.2f}]"


def _chain_table(summaries: Sequence[ChainHop]) -> Table:
    table = Table(title="chain: KL to dense (1e-3 nats) hop by hop", box=SIMPLE, pad_edge=False)
    modes = list(dict.fromkeys(s.mode for s in summaries))
    table.add_column("hop")
    for mode in modes:
        table.add_column(mode, justify="right")
    for hop in sorted({s.hop for s in summaries}):
        here = {s.mode: s for s in summaries if s.hop == hop}
        table.add_row(f"{hop}: {here[modes[0]].edge}", *(f"{1e3 * here[mode].kl:.1f}" for mode in modes))
    return table
