"""A chart with one lane a method: panels of dots with intervals, or of bars, side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..figures import Interval, Summary
from .canvas import MARKERS, SIZES, TEXT, Canvas, Theme
from .kinds import Entry, Kind
from .labels import log_range, log_ticks, width_of
from .numbers import shortened, tick

_VALUE, _GAP, _TITLE, _TICKS, _EDGE = 46, 22, 26, 24, 12
_DIVIDER = "with a further prefill of the same context"


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    of: Callable[[Summary], float]
    spell: Callable[[float], str]
    """Of a value, beside its mark."""
    ci: Callable[[Summary], Interval | None] = lambda summary: None
    log: bool = False
    bars: bool = False
    """From zero, instead of dots."""
    tick: Callable[[float], str] = tick
    mark: float | None = None
    """A value that others are seen against."""
    limits: tuple[float, float] | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class _Lanes:
    entries: tuple[Entry, ...]
    places: tuple[float, ...]
    """Centres of the lanes, in lanes from the top."""
    count: float
    divider: float | None
    """Where what needs a reference prefill begins."""


def _lanes(entries: Sequence[Entry]) -> _Lanes:
    others = [e for e in entries if e.kind is not Kind.REFERENCE]
    extra = 1 if others and len(others) < len(entries) else 0
    places = [i + 0.5 + (extra if e.kind is Kind.REFERENCE else 0) for i, e in enumerate(entries)]
    return _Lanes(tuple(entries), tuple(places), len(entries) + extra, len(others) + 0.5 if extra else None)


def wide_lanes(theme: Theme, width: int, entries: Sequence[Entry], panels: Sequence[Panel]) -> Figure:
    """Names in front of their lanes."""
    lanes, lane = _lanes(entries), 25
    names = 20 + max((width_of(shortened(e.method), bold=e.kind is Kind.OURS) for e in entries), default=0.0)
    canvas = Canvas(theme, width, _TITLE + lane * lanes.count + _TICKS)
    _stripes(canvas, lanes, _TITLE, lane)
    for entry, place in zip(lanes.entries, lanes.places, strict=True):
        _name(canvas, entry, names - 12, _TITLE + place * lane, "right")
    if lanes.divider is not None:
        canvas.text(names, _TITLE + lanes.divider * lane, _DIVIDER, theme.muted, style="italic")
    _panels(canvas, lanes, panels, names, _TITLE, lane, 0.0)
    return canvas.figure


def narrow_lanes(theme: Theme, width: int, entries: Sequence[Entry], blocks: Sequence[Sequence[Panel]]) -> Figure:
    """Names above their lanes, and blocks of panels below one another."""
    lanes, lane = _lanes(entries), 38
    block_height = _TITLE + lane * lanes.count + _TICKS + 14
    canvas = Canvas(theme, width, block_height * len(blocks) - 14)
    for i, panels in enumerate(blocks):
        top = i * block_height + _TITLE
        _stripes(canvas, lanes, top, lane)
        for entry, place in zip(lanes.entries, lanes.places, strict=True):
            _name(canvas, entry, _EDGE, top + place * lane - 8, "left")
        if lanes.divider is not None:
            canvas.text(_EDGE, top + lanes.divider * lane + 4, _DIVIDER, theme.muted, style="italic")
        _panels(canvas, lanes, panels, _EDGE, top, lane, 0.2)
    return canvas.figure


def _panels(
    canvas: Canvas, lanes: _Lanes, panels: Sequence[Panel], left: float, top: float, lane: float, lower: float
) -> None:
    """``lower``: how far below a lane's centre its marks are, in lanes."""
    room = canvas.width - left - len(panels) * _VALUE - (len(panels) - 1) * _GAP
    for panel in panels:
        width = room * panel.weight / sum(p.weight for p in panels)
        axes = canvas.axes(left, top, width, lane * lanes.count)
        axes.set_ylim(lanes.count, 0)
        axes.yaxis.set_visible(False)
        canvas.text(left, top - 14, panel.title, canvas.theme.ink, fontweight="bold")
        _scale(axes, panel, lanes, round(width / 42))
        if panel.mark is not None:
            axes.axvline(panel.mark, color=canvas.theme.muted, linewidth=1, linestyle=(0, (3, 2)), zorder=1)
        for entry, place in zip(lanes.entries, lanes.places, strict=True):
            (_bar if panel.bars else _dot)(axes, canvas.theme, panel, entry, place + lower)
            value = panel.spell(panel.of(entry.summary))
            strong = {"fontweight": "bold"} if entry.kind is Kind.OURS else {}
            y = top + (place + lower) * lane
            canvas.text(left + width + _VALUE - 4, y, value, canvas.theme.ink, ha="right", **strong)
        left += width + _VALUE + _GAP


def _scale(axes: Axes, panel: Panel, lanes: _Lanes, ticks: int) -> None:
    values = [panel.of(e.summary) for e in lanes.entries]
    ends = [end for e in lanes.entries for end in panel.ci(e.summary) or ()]
    marks = [] if panel.mark is None else [panel.mark]
    if panel.log:
        floor = min((v for v in values if v > 0), default=1.0) / 30
        low, high = log_range([v for v in (*values, *ends, *marks) if v > floor])
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        log_ticks(axes.xaxis, low, high, max(2, ticks))
    else:
        highest = max([*values, *ends, *marks])
        axes.set_xlim(*(panel.limits or (0, 1.02 * highest if highest > 0 else 1)))
        axes.locator_params(axis="x", nbins=min(8, max(2, ticks - 1)))
        axes.xaxis.set_major_formatter(lambda value, place: panel.tick(value))


def _dot(axes: Axes, theme: Theme, panel: Panel, entry: Entry, y: float) -> None:
    value, interval = panel.of(entry.summary), panel.ci(entry.summary)
    if panel.log and value <= 0:
        return
    colour = theme.of(entry.kind)
    if interval is not None:
        low = max(interval[0], axes.get_xlim()[0])
        axes.plot([low, interval[1]], [y, y], color=colour, linewidth=2.2 if entry.kind is Kind.OURS else 1.6)
    axes.plot([value], [y], MARKERS[entry.kind], color=colour, markersize=SIZES[entry.kind], clip_on=False)


def _bar(axes: Axes, theme: Theme, panel: Panel, entry: Entry, y: float) -> None:
    axes.barh([y], [panel.of(entry.summary)], height=0.42, color=theme.of(entry.kind))


def _name(canvas: Canvas, entry: Entry, x: float, y: float, align: str) -> None:
    strong = {"fontweight": "bold"} if entry.kind is Kind.OURS else {}
    colour = canvas.theme.ours if entry.kind is Kind.OURS else canvas.theme.ink
    canvas.text(x, y, shortened(entry.method), colour, ha=align, fontsize=TEXT, **strong)


def _stripes(canvas: Canvas, lanes: _Lanes, top: float, lane: float) -> None:
    for entry, place in zip(lanes.entries, lanes.places, strict=True):
        if entry.kind is Kind.OURS:
            y = 1 - (top + (place + 0.5) * lane) / canvas.height
            canvas.figure.add_artist(
                Rectangle(
                    (0, y), 1, lane / canvas.height, facecolor=canvas.theme.ours_stripe, zorder=-1, antialiased=False
                )
            )
