"""One setting varied, all else at its default."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ..figures import Variant
from .canvas import HALF, TEXT, Canvas, Chart, Theme
from .labels import log_range, log_ticks, width_of
from .numbers import percent, ratio, shortened, tick


def ablation_chart(name: str, title: str, variants: Sequence[Variant]) -> Chart:
    """KL ÷ rotation only by value, the default filled and named; beside it what is recomputed."""

    def draw(theme: Theme, width: int) -> Figure:
        lane, top = 27, 30
        names = [shortened(v.value, 20) for v in variants]
        left = max(36.0, max(width_of(n) for n in names) + 14, width_of("default") + 14)
        height = lane * len(variants)
        recomputed = [v.recompute for v in variants if v.recompute is not None]
        right = 92 if recomputed else 46
        canvas = Canvas(theme, width, top + height + 24)
        axes = canvas.axes(left, top, width - left - right, height)
        ends = [end for v in variants for end in (v.kl_vs_none, *v.kl_vs_none_ci)]
        centres = [v.kl_vs_none for v in variants]
        if min(centres) > 0 and max(centres) > 8 * min(centres):
            low, high = log_range([end for end in ends if end > min(centres) / 10])
            axes.set_xscale("log")
            axes.set_xlim(low, high)
            log_ticks(axes.xaxis, low, high, 4)
        else:
            axes.set_xlim(0, 1.05 * max(ends))
            axes.locator_params(axis="x", nbins=4)
            axes.xaxis.set_major_formatter(lambda value, place: tick(value))
        axes.set_ylim(len(variants), 0)
        axes.yaxis.set_visible(False)
        canvas.text(left, 12, "KL ÷ rotation only", theme.ink, fontweight="bold")
        if recomputed:
            canvas.text(width - 4, 12, "Recomp.", theme.ink, ha="right", fontweight="bold")
        for i, (variant, label) in enumerate(zip(variants, names, strict=True)):
            colour = theme.ours if variant.default else theme.other
            strong = {"fontweight": "bold"} if variant.default else {}
            y = top + lane * (i + 0.5)
            ci = [max(variant.kl_vs_none_ci[0], axes.get_xlim()[0]), variant.kl_vs_none_ci[1]]
            axes.plot(ci, [i + 0.5] * 2, color=colour, linewidth=2 if variant.default else 1.6)
            fill = colour if variant.default else theme.surface
            axes.plot(
                [variant.kl_vs_none],
                [i + 0.5],
                "o",
                color=fill,
                markeredgecolor=colour,
                markeredgewidth=1.8,
                markersize=8 if variant.default else 6.5,
                clip_on=False,
            )
            ink = theme.ours if variant.default else theme.ink
            canvas.text(left - 12, y - (6 if variant.default else 0), label, ink, ha="right", **strong)
            if variant.default:
                canvas.text(left - 12, y + 7, "default", ink, ha="right", fontsize=TEXT - 0.5)
            text = ratio(variant.kl_vs_none)
            canvas.text(width - right + 42, y, text, theme.ink, ha="right", **strong)
            if variant.recompute is not None:
                canvas.text(width - 4, y, percent(variant.recompute), theme.muted, ha="right")
        return canvas.figure

    said = "; ".join(f"{v.value}{' (default)' if v.default else ''} {ratio(v.kl_vs_none)}" for v in variants)
    return Chart(name, title, f"KL divided by that of rotation only: {said}.", draw, (HALF,))
