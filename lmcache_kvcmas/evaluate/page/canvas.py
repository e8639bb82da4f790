"""Figures whose places are CSS pixels, in colours that have names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .kinds import Kind

WIDE, NARROW, HALF = 860, 350, 400
TEXT = 12.0
"""Pixels; no chart is shown at less than .85 of its size."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours by their use. Blue, orange and grey differ for all kinds of colour vision; marks differ in shape too."""

    surface: str
    ink: str
    muted: str
    rule: str
    stripe: str
    ours: str
    ours_stripe: str
    other: str
    reference: str

    def of(self, kind: Kind) -> str:
        return {Kind.OURS: self.ours, Kind.OTHER: self.other, Kind.REFERENCE: self.reference}[kind]


LIGHT = Theme("#ffffff", "#1b2027", "#57616b", "#d5dbe1", "#f4f6f8", "#0a59a8", "#e6f0fa", "#68727d", "#ad4a05")
DARK = Theme("#171b20", "#e7eaee", "#a6b0ba", "#363e47", "#1e2329", "#6cb4fa", "#1b2c3f", "#9aa5b1", "#f3a85e")
MARKERS = {Kind.OURS: "o", Kind.OTHER: "s", Kind.REFERENCE: "D"}
SIZES = {Kind.OURS: 8.0, Kind.OTHER: 5.5, Kind.REFERENCE: 5.5}

Draw = Callable[[Theme, int], Figure]
"""Draws at a width in pixels."""


@dataclass(frozen=True, slots=True)
class Chart:
    name: str
    """Its file's name, and its id in the page."""
    title: str
    alt: str
    """What it shows, in words."""
    draw: Draw
    widths: tuple[int, ...] = (WIDE, NARROW)
    """The first for screens, the second, if there is one, for phones."""


class Canvas:
    """A figure on which places are pixels from the top left corner."""

    def __init__(self, theme: Theme, width: int, height: float) -> None:
        self.theme, self.width, self.height = theme, width, height
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor=theme.surface)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, facecolor="none")
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.tick_params(which="both", length=0, labelsize=TEXT - 0.5, labelcolor=self.theme.muted, pad=5)
        axes.grid(color=self.theme.rule, linewidth=0.8)
        axes.set_axisbelow(True)
        return axes

    def text(self, x: float, y: float, text: str, colour: str, **options: Any) -> None:
        place = (x / self.width, 1 - y / self.height)
        self.figure.text(*place, text, **{"color": colour, "fontsize": TEXT, "va": "center", **options})

    def rule(self, x: float, y: float, to_x: float, to_y: float) -> None:
        xs, ys = (x / self.width, to_x / self.width), (1 - y / self.height, 1 - to_y / self.height)
        self.figure.add_artist(Line2D(xs, ys, color=self.theme.muted, linewidth=0.7, alpha=0.6))
