"""Figures as people read them."""

from datetime import timedelta

from rich.table import Table

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = (("w", 604_800), ("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


def size(n: float) -> str:
    """ "1.5 MiB"."""
    unit = 0
    while abs(n) >= 1023.95 and unit < len(_SIZES) - 1:
        n, unit = n / 1024, unit + 1
    return f"{n:.0f} B" if not unit else f"{n:.1f} {_SIZES[unit]}"


def age(seconds: float | None) -> str:
    """ "3d 4h", in the two largest units; "–" for None."""
    if seconds is None:
        return "–"
    left, parts = max(0, int(seconds)), []
    for unit, length in _TIMES[1:]:
        count, left = divmod(left, length)
        if count:
            parts.append(f"{count}{unit}")
        elif parts:
            break
    return " ".join(parts[:2]) or "0s"


def parse_age(text: str) -> float:
    """Seconds of "90s", "30m", "12h", "3d" or "2w".

    Raises:
        ValueError: it is none of them.
    """
    units = dict(_TIMES)
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * units[unit]
        timedelta(seconds=seconds)
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{text!r} is no age. Allowed: a number and one of s, m, h, d, w, as in 3d") from None
    if not seconds >= 0:
        raise ValueError(f"{text!r} is no age. Allowed: 0s or more")
    return seconds


def plain_table(title: str, *columns: str, left: int = 1) -> Table:
    """A table without lines whose first ``left`` columns are texts, which fold; the others are figures."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        figure = place >= left
        table.add_column(name, justify="right" if figure else "left", no_wrap=figure, overflow="fold")
    return table
