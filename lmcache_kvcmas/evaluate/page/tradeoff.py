"""What recompute buys: every method as a point."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .canvas import MARKERS, NARROW, SIZES, TEXT, Canvas, Chart, Theme
from .kinds import Entry, Kind, predictions
from .labels import Box, beside, log_range, log_ticks, pixels, width_of
from .numbers import nats, percent, shortened


def tradeoff_chart(name: str, title: str, entries: Sequence[Entry]) -> Chart | None:
    """Recomputed share against KL, with the lower edge of what needs no reference prefill. None below three methods."""
    shown = [e for e in entries if e.summary.kl > 0]
    if len(shown) < 3:
        return None
    edge = lower_edge(shown)

    def draw(theme: Theme, width: int) -> Figure:
        return _narrow(theme, width, shown, edge) if width == NARROW else _wide(theme, width, shown, edge)

    said = (f"{e.method} {percent(e.summary.recompute)}, {nats(e.summary.kl)}" for e in shown)
    alt = f"Recomputed share, and KL to dense in 1e-3 nats: {'; '.join(said)}."
    return Chart(name, title, alt, draw)


def lower_edge(entries: Sequence[Entry]) -> list[Entry]:
    """Those that no other prediction beats in both KL and recompute, by recompute."""
    edge: list[Entry] = []
    for entry in sorted(predictions(list(entries)), key=lambda e: (e.summary.recompute, e.summary.kl)):
        if not edge or entry.summary.kl < edge[-1].summary.kl:
            edge.append(entry)
    return edge


def _plot(canvas: Canvas, axes: Axes, entries: Sequence[Entry], edge: Sequence[Entry], ticks: int) -> None:
    theme = canvas.theme
    low, high = log_range([1e3 * e.summary.kl for e in entries], 0.08)
    furthest = max(e.summary.recompute for e in entries)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlim(-0.03 * max(furthest, 0.1), 1.08 * max(furthest, 0.1))
    log_ticks(axes.yaxis, low, high, ticks)
    axes.xaxis.set_major_formatter(lambda value, place: percent(value) if value >= 0 else "")
    xs = [*(e.summary.recompute for e in edge), axes.get_xlim()[1]]
    ys = [1e3 * e.summary.kl for e in edge]
    axes.step(xs, [*ys, ys[-1]] if ys else [], where="post", color=theme.muted, linewidth=1.2, linestyle=(0, (3, 2)))
    for entry in entries:
        at = [entry.summary.recompute], [1e3 * entry.summary.kl]
        axes.plot(
            *at,
            MARKERS[entry.kind],
            color=theme.of(entry.kind),
            markersize=SIZES[entry.kind] + 1,
            markeredgecolor=theme.surface,
            markeredgewidth=1,
            clip_on=False,
            zorder=4 if entry.kind is Kind.OURS else 3,
        )


def _along(canvas: Canvas, axes: Axes, edge: Sequence[Entry]) -> list[Box]:
    """The steps of the dashed line, as boxes to keep labels from."""
    corners = [pixels(axes, canvas.height, e.summary.recompute, 1e3 * e.summary.kl) for e in edge]
    if not corners:
        return []
    ends = [*corners[1:], (axes.get_position().x1 * canvas.width, corners[-1][1])]
    boxes = []
    for (x, y), (to_x, to_y) in zip(corners, ends, strict=True):
        boxes += [Box(x, y - 2, to_x, y + 2), Box(to_x - 2, min(y, to_y), to_x + 2, max(y, to_y))]
    return boxes


def _wide(theme: Theme, width: int, entries: Sequence[Entry], edge: Sequence[Entry]) -> Figure:
    left, top, height = 52, 30, 400
    canvas = Canvas(theme, width, top + height + 48)
    axes = canvas.axes(left, top, width - left - 24, height)
    _plot(canvas, axes, entries, edge, 10)
    canvas.text(4, 12, "KL to dense, 10⁻³ nats", theme.ink, fontweight="bold")
    canvas.text(left, top + height + 36, "Recomputed, of tokens × layers", theme.ink, fontweight="bold")
    first = sorted(entries, key=lambda e: e.kind is not Kind.OURS)
    points = [pixels(axes, canvas.height, e.summary.recompute, 1e3 * e.summary.kl) for e in first]
    names = [shortened(e.method) for e in first]
    room = Box(left, top - 8, width, top + height)
    widths = [width_of(n, bold=e.kind is Kind.OURS) for e, n in zip(first, names, strict=True)]
    boxes = beside(points, widths, room, _along(canvas, axes, edge))
    for entry, name, (x, y), box in zip(first, names, points, boxes, strict=True):
        colour = theme.of(entry.kind) if entry.kind is not Kind.OTHER else theme.ink
        strong = {"fontweight": "bold"} if entry.kind is Kind.OURS else {}
        middle = (box.top + box.bottom) / 2
        _lead(canvas, x, y, box)
        left_of = box.right < x
        canvas.text(
            box.right if left_of else box.left, middle, name, colour, ha="right" if left_of else "left", **strong
        )
    return canvas.figure


def _lead(canvas: Canvas, x: float, y: float, box: Box) -> None:
    """A thin line from a point to its label, where that is not right beside it."""
    middle = (box.top + box.bottom) / 2
    if abs(middle - y) > 15:
        canvas.rule(x, y, box.left - 2 if box.left > x else box.right + 2 if box.right < x else x, middle)


def _narrow(theme: Theme, width: int, entries: Sequence[Entry], edge: Sequence[Entry]) -> Figure:
    """Numbers beside the points, names below."""
    left, top, height, line = 40, 30, 300, 21
    below = top + height + 58
    canvas = Canvas(theme, width, below + line * len(entries))
    axes = canvas.axes(left, top, width - left - 14, height)
    _plot(canvas, axes, entries, edge, 8)
    canvas.text(4, 12, "KL to dense, 10⁻³ nats", theme.ink, fontweight="bold")
    canvas.text(left, top + height + 34, "Recomputed, of tokens × layers", theme.ink, fontweight="bold")
    points = [pixels(axes, canvas.height, e.summary.recompute, 1e3 * e.summary.kl) for e in entries]
    numbers = [str(i) for i in range(1, len(entries) + 1)]
    boxes = beside(
        points, [8.0 * len(n) for n in numbers], Box(left, top - 8, width, top + height), _along(canvas, axes, edge)
    )
    for i, (entry, number, point, box) in enumerate(zip(entries, numbers, points, boxes, strict=True)):
        colour = theme.of(entry.kind) if entry.kind is not Kind.OTHER else theme.ink
        strong = {"fontweight": "bold"} if entry.kind is Kind.OURS else {}
        _lead(canvas, *point, box)
        canvas.text(box.left, (box.top + box.bottom) / 2, number, colour, **strong)
        y = below + line * (i + 0.5)
        canvas.text(24, y, number, theme.muted, ha="right", fontsize=TEXT - 0.5)
        canvas.text(32, y, shortened(entry.method), colour, fontsize=TEXT - 0.5, **strong)
        figures = f"{percent(entry.summary.recompute)} · {nats(entry.summary.kl)}"
        canvas.text(width - 4, y, figures, theme.muted, ha="right", fontsize=TEXT - 0.5)
    return canvas.figure
