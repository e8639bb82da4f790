"""Tables that hold every number of the documents, each with its exact value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..figures import ChainHop, CurvePoint, HeldOut, Hop, Interval, Summary, Variant
from .documents import Calibration, Ranks, Row
from .kinds import Entry, Kind, kind_of
from .numbers import duration, figure, mib, nats, nats_span, percent, ratio, ratios, shares, tick
from .scopes import edge_name


class Cell(NamedTuple):
    text: str
    exact: str = ""
    """The document's own number, or two of an interval. Nothing: the cell is text."""


class Line(NamedTuple):
    head: str
    cells: tuple[Cell, ...]
    kind: Kind = Kind.OTHER


@dataclass(frozen=True, slots=True)
class Table:
    caption: str
    columns: tuple[str, ...]
    """The first is that of the heads."""
    lines: tuple[Line, ...]
    open: bool = False
    """Seen at once, without a click."""


def number(value: float | None, spell: Callable[[float], str]) -> Cell:
    return Cell("") if value is None else Cell(spell(value), repr(value))


def interval(value: Interval | None, spell: Callable[[Interval], str]) -> Cell:
    return Cell("") if value is None else Cell(spell(value), f"{value[0]!r} {value[1]!r}")


def table(caption: str, columns: Sequence[str], lines: Sequence[Line], *, always: int = 0, open: bool = False) -> Table:
    """Columns that are empty in every line are left out, unless they are among the first ``always``."""
    kept = [i for i in range(len(columns) - 1) if i < always or any(line.cells[i].text for line in lines)]
    return Table(
        caption,
        (columns[0], *(columns[i + 1] for i in kept)),
        tuple(line._replace(cells=tuple(line.cells[i] for i in kept)) for line in lines),
        open,
    )


_SUMMARY: dict[str, Callable[[Summary], Cell]] = {
    "KL, 10⁻³ nats": lambda s: number(s.kl, nats),
    "KL, 95%": lambda s: interval(s.kl_ci, nats_span),
    "÷ none": lambda s: number(s.kl_vs_none, ratio),
    "÷ none, 95%": lambda s: interval(s.kl_vs_none_ci, ratios),
    "recomputed": lambda s: number(s.recompute, percent),
    "accuracy": lambda s: number(s.accuracy, percent),
    "accuracy, 95%": lambda s: interval(s.accuracy_ci, shares),
    "top-1": lambda s: number(s.top1, _three),
    "exact": lambda s: number(s.exact, ratio),
    "state, MiB": lambda s: number(s.state_bytes, mib),
    "reference prefills": lambda s: number(s.reference_prefills, figure),
    "accepted": lambda s: number(s.accepted, percent),
    "reused": lambda s: number(s.reuse, percent),
    "KV error": lambda s: number(s.kv_error, figure),
    "left of ΔK": lambda s: number(s.res_k, ratio),
    "left of ΔV": lambda s: number(s.res_v, ratio),
    "ê": lambda s: number(s.ehat, figure),
    "error ÷ ê": lambda s: number(s.error_over_ehat, ratio),
    "rank correlation of ê": lambda s: number(s.ehat_rank_correlation, ratio),
    "time": lambda s: number(s.seconds, _seconds),
}


def summary_table(caption: str, entries: Sequence[Entry], *, open: bool = False) -> Table:
    lines = [Line(e.method, tuple(cell(e.summary) for cell in _SUMMARY.values()), e.kind) for e in entries]
    return table(caption, ("method", *_SUMMARY), lines, open=open)


def rows_table(caption: str, rows: Sequence[Row]) -> Table:
    columns = ("method", "edge", "context", "tokens", "KL, 10⁻³ nats", "top-1", "exact", "recomputed", "state, MiB")
    more = ("reference prefills", "gate", "KV error", "error behind the head", "ê", "left of ΔK", "left of ΔV", "time")
    lines = [
        Line(
            r.method,
            (
                Cell(edge_name(r.edge)),
                Cell(r.context),
                number(r.tokens, str),
                number(r.kl, nats),
                number(r.top1, _three),
                Cell(_yes(r.exact)) if isinstance(r.exact, bool) else number(r.exact, ratio),
                number(r.recompute, percent),
                number(r.state_bytes, mib),
                number(r.reference_prefills, figure),
                Cell(r.gate or ""),
                number(r.kv_error, figure),
                number(r.tail_error, figure),
                number(r.ehat, figure),
                number(r.res_k, ratio),
                number(r.res_v, ratio),
                number(r.seconds, _seconds),
            ),
            kind_of(r.method),
        )
        for r in rows
    ]
    return table(caption, (*columns, *more), lines)


def chain_table(caption: str, hops: Sequence[ChainHop]) -> Table:
    lines = [
        Line(
            h.mode,
            (
                number(h.hop, str),
                Cell(edge_name(h.edge)),
                number(h.kl, nats),
                interval(h.kl_ci, nats_span),
                number(h.top1, _three),
            ),
        )
        for h in hops
    ]
    return table(caption, ("mode", "hop", "edge", "KL, 10⁻³ nats", "KL, 95%", "top-1"), lines)


def hops_table(caption: str, hops: Sequence[Hop]) -> Table:
    lines = [
        Line(
            h.method,
            (
                number(h.hop, str),
                number(h.kl, nats),
                interval(h.kl_ci, nats_span),
                number(h.kl_vs_none, ratio),
                number(h.top1, _three),
                number(h.exact, ratio),
            ),
            kind_of(h.method),
        )
        for h in hops
    ]
    return table(caption, ("method", "hop", "KL, 10⁻³ nats", "KL, 95%", "÷ none", "top-1", "exact"), lines)


def ranks_table(caption: str, ranks: Ranks) -> Table:
    parts = (ranks.delta_k, ranks.delta_v, ranks.base_k, ranks.base_v)
    lines = [
        Line(str(layer), tuple(number(part[layer] if layer < len(part) else None, figure) for part in parts))
        for layer in range(max(map(len, parts)))
    ]
    return table(caption, ("layer", "ΔK", "ΔV", "K", "V"), lines)


def calibration_table(caption: str, calibration: Calibration, chosen: CurvePoint | None) -> Table:
    points: list[tuple[str, CurvePoint | HeldOut, Interval | None, float | None]] = [
        (tick(p.theta), p, None, p.at_most) for p in sorted(calibration.curve, key=lambda p: p.theta)
    ]
    if calibration.heldout is not None:
        points.append(("held out", calibration.heldout, calibration.heldout.kl_ci, None))
    lines = [
        Line(
            head,
            (
                number(p.reuse, percent),
                number(p.kl, nats),
                interval(ci, nats_span),
                number(p.kl_vs_none, ratio),
                number(p.accepted, percent),
                number(p.accuracy, percent),
                number(p.points, figure),
                number(most, figure),
            ),
            Kind.OURS if p is chosen else Kind.OTHER,
        )
        for head, p, ci, most in points
    ]
    columns = ("θ", "reused", "KL, 10⁻³ nats", "KL, 95%", "÷ none", "accepted", "accuracy", "points lost", "at most")
    return table(caption, columns, lines)


def ablation_table(caption: str, variants: Sequence[Variant]) -> Table:
    lines = [
        Line(
            v.value,
            (
                Cell("default" if v.default else ""),
                number(v.kl_vs_none, ratio),
                interval(v.kl_vs_none_ci, ratios),
                number(v.recompute, percent),
                number(v.state_bytes, mib),
                number(v.seconds, _seconds),
            ),
            Kind.OURS if v.default else Kind.OTHER,
        )
        for v in variants
    ]
    return table(caption, ("value", "", "KL ÷ none", "95%", "recomputed", "state, MiB", "time"), lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _three(value: float) -> str:
    return f"{value:.3f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 100 else duration(value)
