"""What reuse costs: the curve that `kvcmas calibrate` chose a threshold on."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..figures import CurvePoint, HeldOut, Interval
from .canvas import NARROW, Canvas, Chart, Theme
from .documents import Calibration
from .labels import Box, beside, pixels, width_of
from .numbers import percent, tick

_LEFT = 52


class _Measure(NamedTuple):
    slug: str
    title: str
    of: Callable[[CurvePoint | HeldOut], float | None]
    spell: Callable[[float], str]
    limit: float | None
    """The budget's, if it is one of this measure."""
    ci: Callable[[HeldOut], Interval | None] = lambda held: None
    from_zero: bool = True
    height: Callable[[float], float] = lambda spent: spent
    """Where in the chart something stands that is told in the budget's unit."""

    @property
    def budget(self) -> float | None:
        """As a height in the chart."""
        return None if self.limit is None else self.height(self.limit)


class _Mark(NamedTuple):
    """A point that is named."""

    at: CurvePoint | HeldOut
    text: str
    colour: str
    shape: str


def reuse_charts(calibration: Calibration) -> list[Chart]:
    """KL against reuse, and so for whatever else the budget or the traces are about."""
    charts = []
    for measure in _measures(calibration):
        points = [p for p in calibration.curve if measure.of(p) is not None]
        if points:
            charts.append(_chart(measure, sorted(points, key=lambda p: p.theta), calibration))
    return charts


def chosen_point(calibration: Calibration) -> CurvePoint | None:
    """The furthest that the threshold lets pass: thresholds are rounded, upwards."""
    theta = calibration.theta
    passed = [p for p in calibration.curve if theta is not None and p.theta <= theta * (1 + 1e-9)]
    return max(passed, key=lambda p: p.theta, default=None)


def _measures(calibration: Calibration) -> list[_Measure]:
    kl, ratio, points = (_limit(calibration.budget, name) for name in ("kl", "kl_vs_none", "points"))
    first = next((p for p in calibration.curve if p.points is not None and p.accuracy is not None), None)
    dense = None if first is None else (first.accuracy or 0.0) + (first.points or 0.0) / 100
    measures = [
        _Measure(
            "kl",
            "KL to dense, 10⁻³ nats",
            lambda p: 1e3 * p.kl,
            tick,
            kl,
            _nats_ci,
            height=lambda nats: 1e3 * nats,
        ),
        _Measure(
            "accuracy",
            "Correct answers",
            lambda p: p.accuracy,
            percent,
            None if dense is None else points,
            from_zero=False,
            height=lambda lost: (dense or 0.0) - lost / 100,
        ),
    ]
    if ratio is not None:
        measures.insert(1, _Measure("ratio", "KL ÷ rotation only", lambda p: p.kl_vs_none, tick, ratio))
    return measures


def _limit(budget: str, measure: str) -> float | None:
    """What a budget as ``kl<=0.003`` allows of ``measure``."""
    found = re.fullmatch(rf"\s*{measure}\s*<=\s*([0-9.]+(?:e[-+]?[0-9]+)?)\s*", budget)
    return None if found is None else float(found[1])


def _nats_ci(held: HeldOut) -> Interval | None:
    return None if held.kl_ci is None else (1e3 * held.kl_ci[0], 1e3 * held.kl_ci[1])


def _chart(measure: _Measure, points: Sequence[CurvePoint], calibration: Calibration) -> Chart:
    held, chosen = calibration.heldout, chosen_point(calibration)

    def draw(theme: Theme, width: int) -> Figure:
        top, height = 30, 320 if width > NARROW else 260
        canvas = Canvas(theme, width, top + height + 48)
        axes = canvas.axes(_LEFT, top, width - _LEFT - 18, height)
        at = [(p.reuse, measure.of(p) or 0.0) for p in points]
        interval = None if held is None else measure.ci(held)
        bounds = _bounds(measure, points)
        _scale(axes, measure, [*(y for _, y in (*at, *bounds)), *(interval or ()), *_heights(measure, held)])
        if bounds:
            axes.plot(*zip(*bounds, strict=True), color=theme.other, linewidth=1.1, linestyle=(0, (4, 2)))
        axes.plot(*zip(*at, strict=True), "-o", color=theme.other, linewidth=1.8, markersize=4, clip_on=False)
        drawn = [box for path in (at, bounds) for box in _along([pixels(axes, canvas.height, *p) for p in path])]
        if measure.budget is not None:
            axes.axhline(measure.budget, color=theme.muted, linewidth=1.1, linestyle=(0, (3, 2)))
            x, y = pixels(axes, canvas.height, 0.0, measure.budget)
            canvas.text(x + 4, y - 9, f"budget {measure.spell(measure.budget)}", theme.muted)
            drawn += [Box(x, y - 16, x + 90, y), *_along([(x, y), (canvas.width, y)])]
        if held is not None and interval is not None:
            axes.plot([held.reuse] * 2, interval, color=theme.reference, linewidth=2)
            drawn += _along([pixels(axes, canvas.height, held.reuse, end) for end in interval])
        marks: list[_Mark] = []
        if chosen is not None:
            marks.append(_Mark(chosen, f"chosen, θ = {tick(calibration.theta or 0.0)}", theme.ours, "o"))
        if held is not None:
            marks.append(_Mark(held, "held out", theme.reference, "D"))
        _mark(canvas, axes, measure, marks, drawn, (top, top + height))
        canvas.text(4, 12, measure.title, theme.ink, fontweight="bold")
        canvas.text(_LEFT, top + height + 36, "Reused tokens", theme.ink, fontweight="bold")
        return canvas.figure

    said = "; ".join(f"{percent(p.reuse)} reused, {measure.spell(measure.of(p) or 0.0)}" for p in points[:40])
    alt = f"{measure.title} against reuse on development traces: {said}."
    return Chart(f"reuse-{measure.slug}", f"{measure.title}, against reuse", alt, draw)


def _bounds(measure: _Measure, points: Sequence[CurvePoint]) -> list[tuple[float, float]]:
    """Where the ends of the budget's measure lie, if this is its chart."""
    if measure.limit is None:
        return []
    return [(p.reuse, measure.height(p.at_most)) for p in points if p.at_most is not None]


def _heights(measure: _Measure, held: HeldOut | None) -> list[float]:
    found = [measure.budget, None if held is None else measure.of(held)]
    return [y for y in found if y is not None]


def _scale(axes: Axes, measure: _Measure, ys: Sequence[float]) -> None:
    room = 0.12 * (max(ys) if measure.from_zero else max(ys) - min(ys)) or 0.1
    axes.set_ylim(0 if measure.from_zero else min(ys) - room, max(ys) + room)
    axes.set_xlim(-0.01, 1.01)
    axes.yaxis.set_major_formatter(lambda value, place: measure.spell(value))
    axes.xaxis.set_major_formatter(lambda value, place: percent(value))


def _mark(
    canvas: Canvas,
    axes: Axes,
    measure: _Measure,
    marks: Sequence[_Mark],
    drawn: Sequence[Box],
    rows: tuple[float, float],
) -> None:
    """Draw and name them, between the two ``rows`` and clear of what is ``drawn``."""
    seen = [(mark, mark.at.reuse, y) for mark in marks if (y := measure.of(mark.at)) is not None]
    places = [pixels(axes, canvas.height, x, y) for _, x, y in seen]
    room = Box(_LEFT, rows[0], canvas.width, rows[1])
    boxes = beside(places, [width_of(mark.text, bold=True) for mark, _, _ in seen], room, drawn)
    for (mark, x, y), (across, down), box in zip(seen, places, boxes, strict=True):
        axes.plot([x], [y], mark.shape, color=mark.colour, markersize=9, zorder=5, clip_on=False)
        left_of = box.right < across
        start, middle = box.right if left_of else box.left, (box.top + box.bottom) / 2
        if abs(middle - down) > 20:
            canvas.rule(across, down, start, middle)
        canvas.text(start, middle, mark.text, mark.colour, ha="right" if left_of else "left", fontweight="bold")


def _along(path: Sequence[tuple[float, float]]) -> list[Box]:
    """A drawn line as boxes to keep texts from."""
    boxes = []
    for (x, y), (to_x, to_y) in pairwise(path):
        steps = max(1, round(max(abs(to_x - x), abs(to_y - y)) / 8))
        for i in range(steps + 1):
            at, height = x + (to_x - x) * i / steps, y + (to_y - y) * i / steps
            boxes.append(Box(at - 4, height - 4, at + 4, height + 4))
    return boxes
