"""What a setting may be: each rule parses a value from a file, or says None, and can say what is allowed."""

import math
import re
from typing import Any, NamedTuple

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Whole(NamedTuple):
    low: int
    high: int

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def parse(self, value: Any) -> int | None:
        ok = isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high
        return value if ok else None


class Positive(NamedTuple):
    allowed: str = "a number greater than 0"

    def parse(self, value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) and number > 0 else None


class Share(NamedTuple):
    allowed: str = "a number from 0 to 1"

    def parse(self, value: Any) -> float | None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if number and 0 <= value <= 1 else None


class Bytes(NamedTuple):
    low: int
    allowed: str = 'a number of bytes, such as 1073741824 or "512MiB" (B, KB, MB, GB, KiB, MiB, GiB), 1 TiB at most'

    def parse(self, value: Any) -> int | None:
        if isinstance(value, str):
            match = _BYTES.fullmatch(value)
            unit = _UNITS.get(match[2].upper()) if match else None
            if match is None or unit is None:
                return None
            # More digits than any size has: int() of thousands of them would only cost time.
            value = int(float(match[1]) * unit) if len(match[1]) <= 24 else None
        ok = isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= 2**40
        return value if ok else None


class Switch(NamedTuple):
    allowed: str = "true or false"

    def parse(self, value: Any) -> bool | None:
        return value if isinstance(value, bool) else None


class Text(NamedTuple):
    allowed: str = "a text of at most 256 characters (in quotes, if it looks like a number)"

    def parse(self, value: Any) -> str | None:
        return value if isinstance(value, str) and len(value) <= 256 else None


class Choice(NamedTuple):
    options: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(self.options)

    def parse(self, value: Any) -> str | None:
        return value if isinstance(value, str) and value in self.options else None


Rule = Whole | Positive | Share | Bytes | Switch | Text | Choice


def shown(value: Any) -> str:
    """A value for an error's text, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
