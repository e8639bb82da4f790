"""How figures are spelt."""

from collections.abc import Sequence
from math import floor, isfinite, log10

from ..figures import Interval

NATS = "×\N{NO-BREAK SPACE}10⁻³\N{NO-BREAK SPACE}nats"
"""Behind what `nats` gives, in sentences."""


def figure(value: float) -> str:
    """About three digits: 113, 81.0, 3.01, 0.26, 0.0043."""
    size = abs(value)
    if value == 0 or not isfinite(value):
        return "0" if value == 0 else str(value)
    if size >= 0.095:
        text = f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
    else:
        text = f"{value:.{1 - floor(log10(size))}f}" if size >= 1e-4 else f"{value:.1e}"
    return text.replace("-", "−")


def tick(value: float) -> str:
    """Of an axis: no zeros behind."""
    return f"{value:g}".replace("-", "−")


def nats(kl: float) -> str:
    """In 1e-3 nats."""
    return figure(1e3 * kl)


def percent(share: float) -> str:
    value = 100 * share
    return f"{value:.1f}%" if 0 < value < 9.95 and f"{value:.1f}"[-1] != "0" else f"{value:.0f}%"


def mib(size: float) -> str:
    value = size / 2**20
    return "0" if value == 0 else f"{value:.1f}" if value >= 0.1 else f"{value:.3f}"


def ratio(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def ratios(interval: Interval) -> str:
    return f"{ratio(interval[0])} to {ratio(interval[1])}"


def nats_span(interval: Interval) -> str:
    return f"{nats(interval[0])} to {nats(interval[1])}"


def shares(interval: Interval) -> str:
    return f"{percent(interval[0])} to {percent(interval[1])}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def shortened(text: str, length: int = 28) -> str:
    """For a chart: one line, no longer than ``length``, nothing that XML forbids."""
    clean = "".join(c if c.isprintable() else "�" for c in text)
    return clean if len(clean) <= length else f"{clean[: length - 1]}…"
