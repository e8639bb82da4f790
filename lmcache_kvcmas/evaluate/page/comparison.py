"""Methods side by side: KL and what it costs, accuracy, memory."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ..figures import Interval, Summary
from .canvas import NARROW, Chart, Theme
from .kinds import Entry, Kind
from .lanes import Panel, narrow_lanes, wide_lanes
from .numbers import figure, mib, nats, percent, ratio

_KL = Panel(
    title="KL to dense, 10⁻³ nats",
    of=lambda s: 1e3 * s.kl,
    spell=figure,
    ci=lambda s: (1e3 * s.kl_ci[0], 1e3 * s.kl_ci[1]),
    log=True,
)
_RATIO = Panel(
    title="KL ÷ rotation only",
    of=lambda s: s.kl_vs_none,
    spell=ratio,
    ci=lambda s: s.kl_vs_none_ci,
    log=True,
    mark=1.0,
)
_RECOMPUTE = Panel(
    title="Recomputed",
    of=lambda s: s.recompute,
    spell=percent,
    bars=True,
    tick=percent,
    weight=0.5,
)
_STATE = Panel(title="State kept, MiB", of=lambda s: s.state_bytes / 2**20, spell=lambda v: mib(v * 2**20), bars=True)


def kl_chart(name: str, title: str, entries: Sequence[Entry]) -> Chart:
    """KL and KL ÷ rotation only with their intervals, and the share that is recomputed. Dense is 0: it has no lane."""
    shown = [e for e in entries if e.method != "dense"]

    def draw(theme: Theme, width: int) -> Figure:
        if width > NARROW:
            return wide_lanes(theme, width, shown, (_KL, _RATIO, _RECOMPUTE))
        return narrow_lanes(theme, width, shown, ((_KL, _RECOMPUTE), (_RATIO,)))

    said = (
        f"{e.method} {nats(e.summary.kl)}, {ratio(e.summary.kl_vs_none)}, {percent(e.summary.recompute)}" for e in shown
    )
    alt = f"KL to dense in 1e-3 nats, KL divided by that of rotation only, and recomputed share: {'; '.join(said)}."
    return Chart(name, title, alt, draw)


def accuracy_chart(name: str, title: str, entries: Sequence[Entry]) -> Chart | None:
    """None where no accuracy was measured. Dense prefill's own is the dashed line."""
    shown = [e for e in entries if e.summary.accuracy is not None]
    if not shown:
        return None
    # Best first: here more is better, and dense prefill is one of them.
    shown.sort(key=lambda e: (e.kind is Kind.REFERENCE, -(e.summary.accuracy or 0.0)))
    dense = next((e.summary.accuracy for e in shown if e.method == "dense"), None)
    ends = [end for e in shown for end in (*(e.summary.accuracy_ci or ()), e.summary.accuracy or 0.0)]
    low, high = max(0.0, min(ends) - 0.05), min(1.0, max(ends) + 0.03)
    panel = Panel(
        title="Correct answers",
        of=lambda s: s.accuracy or 0.0,
        spell=percent,
        ci=_accuracy_ci,
        tick=percent,
        mark=dense,
        limits=(low, high) if high > low else (0.0, 1.0),
    )

    def draw(theme: Theme, width: int) -> Figure:
        if width > NARROW:
            return wide_lanes(theme, width, shown, (panel,))
        return narrow_lanes(theme, width, shown, ((panel,),))

    alt = f"Share of correct answers: {'; '.join(f'{e.method} {percent(e.summary.accuracy or 0.0)}' for e in shown)}."
    return Chart(name, title, alt, draw)


def memory_chart(name: str, title: str, entries: Sequence[Entry]) -> Chart | None:
    """None where nothing keeps any."""
    shown = sorted(entries, key=lambda e: (e.kind is Kind.REFERENCE, e.summary.state_bytes))
    shown = [e for e in shown if e.method != "dense"]
    if not any(e.summary.state_bytes for e in shown):
        return None

    def draw(theme: Theme, width: int) -> Figure:
        if width > NARROW:
            return wide_lanes(theme, width, shown, (_STATE,))
        return narrow_lanes(theme, width, shown, ((_STATE,),))

    alt = f"State kept, in MiB: {'; '.join(f'{e.method} {mib(e.summary.state_bytes)}' for e in shown)}."
    return Chart(name, title, alt, draw)


def _accuracy_ci(summary: Summary) -> Interval | None:
    return summary.accuracy_ci
