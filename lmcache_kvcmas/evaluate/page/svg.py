"""Charts as SVG for the page, whose colours are the page's own, and as files."""

import io
import re
import warnings
from dataclasses import asdict
from pathlib import Path

import matplotlib
from markupsafe import Markup, escape

from .canvas import DARK, LIGHT, Chart, Theme

_SETTINGS = {"svg.fonttype": "none", "text.parse_math": False, "font.family": "DejaVu Sans"}
_VARIABLES = {colour: f"var(--{name.replace('_', '-')})" for name, colour in asdict(LIGHT).items()}


def inline_svg(chart: Chart, width: int) -> Markup:
    """For the page: colours are CSS variables, text is in the page's font, ids are unique in the page."""
    svg = _drawn(chart, LIGHT, width, "svg").decode()
    height = re.search(r'viewBox="0 0 \S+ ([\d.]+)"', svg)
    assert height is not None
    start = svg.index(">", svg.index("<svg")) + 1
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", svg[start:], flags=re.DOTALL)
    svg = re.sub(r"<[^>]+>", lambda tag: _for_page(tag[0]), svg)
    head = Markup(
        '<svg class="chart" viewBox="0 0 {width} {height}" style="--width: {width}px" role="img" '
        'aria-labelledby="{name}-title {name}-alt"><title id="{name}-title">{title}</title>'
        '<desc id="{name}-alt">{alt}</desc>'
    ).format(width=width, height=height[1], name=f"{chart.name}-{width}", title=chart.title, alt=chart.alt)
    return head + Markup(re.sub(r"\s*\n\s*", "\n", svg))


def _for_page(tag: str) -> str:
    """Texts are escaped, so that this sees what matplotlib wrote, and nothing of a user's."""
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    return re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda colour: _VARIABLES.get(colour[0], colour[0]), tag)


def write_plots(chart: Chart, folder: Path) -> None:
    """``NAME.svg`` and ``NAME.png``, light and dark."""
    for suffix, theme in (("", LIGHT), ("-dark", DARK)):
        svg = _drawn(chart, theme, chart.widths[0], "svg").decode()
        start = svg.index(">", svg.index("<svg")) + 1
        titles = f"\n <title>{escape(chart.title)}</title>\n <desc>{escape(chart.alt)}</desc>"
        (folder / f"{chart.name}{suffix}.svg").write_text(svg[:start] + titles + svg[start:], "utf-8")
        (folder / f"{chart.name}{suffix}.png").write_bytes(_drawn(chart, theme, chart.widths[0], "png"))


def _drawn(chart: Chart, theme: Theme, width: int, kind: str) -> bytes:
    written = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS | {"svg.hashsalt": f"{chart.name} {width}"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        options = {"metadata": {"Date": None, "Creator": None}} if kind == "svg" else {"dpi": 144}
        chart.draw(theme, width).savefig(written, format=kind, **options)
    return written.getvalue()
