"""Lines: KL over hops, effective rank by layer."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..figures import Interval
from .canvas import HALF, MARKERS, TEXT, Canvas, Chart, Theme
from .documents import Ranks
from .kinds import Kind
from .labels import log_range, log_ticks, pixels, spread, width_of
from .numbers import figure, shortened


class Line(NamedTuple):
    name: str
    kind: Kind
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    cis: tuple[Interval, ...] = ()
    dashed: bool = False


def hops_chart(name: str, title: str, lines: Sequence[Line], ticks: Mapping[int, str]) -> Chart:
    """KL in 1e-3 nats by hop, with intervals. ``ticks``: what a hop is called."""

    def draw(theme: Theme, width: int) -> Figure:
        labels = max(width_of(shortened(line.name, 26), TEXT - 0.5) for line in lines) + 22
        top, height = 30, max(300, 16 * len(lines) + 20)
        canvas = Canvas(theme, width, top + height + 44)
        axes = canvas.axes(44, top, width - 44 - labels, height)
        axes.set_yscale("log")
        low, high = log_range([end for line in lines for end in (*line.ys, *(e for ci in line.cis for e in ci))])
        lowest = min((y for line in lines for y in line.ys if y > 0), default=low) / 10
        low = max(low, lowest)
        axes.set_ylim(low, high)
        log_ticks(axes.yaxis, low, high, 9)
        axes.set_xlim(min(ticks) - 0.15, max(ticks) + 0.15)
        roomy = axes.get_position().width * width / len(ticks) > max(width_of(t) for t in ticks.values())
        axes.set_xticks(list(ticks), [ticks[hop] if roomy else str(hop) for hop in ticks])
        axes.grid(visible=False, axis="x")
        canvas.text(4, 12, "KL to dense, 10⁻³ nats", theme.ink, fontweight="bold")
        canvas.text(44, top + height + 34, "Hop", theme.ink, fontweight="bold")
        _lines(canvas, axes, lines, top, height, 26)
        return canvas.figure

    said = "; ".join(f"{line.name} {', '.join(figure(y) for y in line.ys)}" for line in lines)
    return Chart(name, title, f"KL to dense in 1e-3 nats, hop by hop: {said}.", draw)


def ranks_chart(name: str, title: str, ranks: Ranks) -> Chart:
    parts = (
        ("ΔK", Kind.OURS, ranks.delta_k, False),
        ("ΔV", Kind.OURS, ranks.delta_v, True),
        ("K", Kind.OTHER, ranks.base_k, False),
        ("V", Kind.OTHER, ranks.base_v, True),
    )
    lines = [Line(n, kind, tuple(range(len(v))), v, (), dashed) for n, kind, v, dashed in parts if v]

    def draw(theme: Theme, width: int) -> Figure:
        top, height = 30, 220
        canvas = Canvas(theme, width, top + height + 44)
        axes = canvas.axes(40, top, width - 40 - 40, height)
        axes.set_ylim(0, 1.06 * max((y for line in lines for y in line.ys), default=1))
        axes.locator_params(axis="x", nbins=6, integer=True)
        canvas.text(4, 12, "Effective rank", theme.ink, fontweight="bold")
        canvas.text(40, top + height + 34, "Layer", theme.ink, fontweight="bold")
        _lines(canvas, axes, lines, top, height, 26)
        return canvas.figure

    said = "; ".join(f"{line.name} {figure(min(line.ys))} to {figure(max(line.ys))}" for line in lines)
    return Chart(name, title, f"Effective rank by layer: {said}.", draw, (HALF,))


def _lines(canvas: Canvas, axes: Axes, lines: Sequence[Line], top: float, height: float, length: int) -> None:
    """Ours above the others; each is named at its end."""
    theme = canvas.theme
    marked = max((len(line.xs) for line in lines), default=0) <= 12
    lines = _dodged(lines)
    for line in sorted(lines, key=lambda line: line.kind is Kind.OURS):
        colour = theme.of(line.kind)
        for x, (low, high) in zip(line.xs, line.cis, strict=False):
            axes.plot([x, x], [max(low, axes.get_ylim()[0]), high], color=colour, linewidth=1.2, alpha=0.45)
        axes.plot(
            line.xs,
            line.ys,
            marker=MARKERS[line.kind] if marked else None,
            markersize=5,
            color=colour,
            linewidth=2.2 if line.kind is Kind.OURS else 1.4,
            linestyle=(0, (4, 2)) if line.dashed else "-",
            zorder=4 if line.kind is Kind.OURS else 3,
        )
    ends = [pixels(axes, canvas.height, line.xs[-1], max(line.ys[-1], axes.get_ylim()[0])) for line in lines]
    places = spread([y for _, y in ends], 15, top, top + height)
    right = axes.get_position().x1 * canvas.width
    for line, (x, y), place in zip(lines, ends, places, strict=True):
        strong = {"fontweight": "bold"} if line.kind is Kind.OURS else {}
        colour = theme.of(line.kind) if line.kind is not Kind.OTHER else theme.ink
        canvas.text(right + 14, place, shortened(line.name, length), colour, fontsize=TEXT - 0.5, **strong)
        canvas.rule(x + 5, y, right + 11, place)


def _dodged(lines: Sequence[Line]) -> list[Line]:
    """Side by side where there are intervals, so that they do not cover one another."""
    hops = [x for line in lines for x in line.xs]
    room = min(0.16, 0.05 * (max(hops) - min(hops))) if hops else 0.0
    step = room / max(1, len(lines) - 1)
    return [
        line._replace(xs=tuple(x - room / 2 + i * step for x in line.xs)) if line.cis else line
        for i, line in enumerate(lines)
    ]
