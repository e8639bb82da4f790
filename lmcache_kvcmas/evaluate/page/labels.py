"""Ticks of logarithmic axes, and labels that do not cover one another."""

from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from math import ceil, floor, log10
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, MaxNLocator

from .canvas import TEXT
from .numbers import tick


def width_of(text: str, size: float = TEXT, bold: bool = False) -> float:
    """At most, in pixels, of a text as names are: fonts differ."""
    return (0.7 if bold else 0.63) * size * len(text)


def log_range(values: Iterable[float], room: float = 0.06) -> tuple[float, float]:
    """What an axis has to span to show the positive ones of ``values``."""
    positive = [v for v in values if v > 0] or [0.1, 1.0]
    low, high = log10(min(positive)), log10(max(positive))
    space = max(room * (high - low), 0.05)
    return 10 ** (low - space), 10 ** (high + space)


def log_ticks(axis: Axis, low: float, high: float, at_most: int) -> None:
    """1, 2 and 5 times powers of ten as far as ``at_most`` of them allow; else fewer, or round ones in a short span."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks: list[float] = []
    for steps, stride in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3), ((1,), 4)):
        ticks = [s * 10.0**p for p in powers[::stride] for s in steps if low <= s * 10.0**p <= high]
        if len(ticks) <= at_most:
            break
    if len(ticks) < 2:
        ticks = [t for t in MaxNLocator(min(at_most, 4)).tick_values(low, high) if low <= t <= high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(FixedLocator([]))
    axis.set_major_formatter(lambda value, place: tick(value))


def spread(places: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """``places`` moved as little as needed to be ``apart`` and between ``low`` and ``high``, in their order."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = [min(max(places[i], low), high) for i in order]
    for _ in range(200):
        pushed = False
        for i, (a, b) in enumerate(pairwise(moved)):
            if b - a < apart - 1e-6:
                middle = (a + b) / 2
                moved[i], moved[i + 1] = middle - apart / 2, middle + apart / 2
                pushed = True
        if moved and moved[0] < low:
            moved[0] = low
        if moved and moved[-1] > high:
            moved[-1] = high
        if not pushed:
            break
    result = [0.0] * len(places)
    for i, value in zip(order, moved, strict=True):
        result[i] = value
    return result


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, wide) * max(0.0, high)


def beside(
    points: Sequence[tuple[float, float]], widths: Sequence[float], room: Box, obstacles: Sequence[Box] = ()
) -> list[Box]:
    """For each point a place for its text, near it, in the ``room``, and clear of all else and of texts before it."""
    taken = [*obstacles, *(Box(x - 6, y - 6, x + 6, y + 6) for x, y in points)]
    placed = []
    for (x, y), wide in zip(points, widths, strict=True):
        high = TEXT + 2
        nearness = sorted(
            product((9, -9 - wide, -wide / 2), (0, -14, 14, -26, 26, -38, 38, -50, 50)),
            key=lambda d: (abs(d[1]), d[0] != 9),
        )
        places = [Box(x + dx, y + dy - high / 2, x + dx + wide, y + dy + high / 2) for dx, dy in nearness]

        def cost(place: Box, y: float = y) -> float:
            away = abs((place.top + place.bottom) / 2 - y)
            outside = (place.right - place.left) * (place.bottom - place.top) - place.overlap(room)
            return away + outside + sum(place.overlap(other) for other in taken)

        best = min(places, key=cost)
        taken.append(best)
        placed.append(best)
    return placed


def pixels(axes: Axes, height: float, x: float, y: float) -> tuple[float, float]:
    """A point of the data, from the canvas' top left corner."""
    across, up = axes.transData.transform((x, y))
    return across, height - up
