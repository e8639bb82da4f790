"""Right or wrong, from the last agent's words alone."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """1 when the first option that the answer names, as a whole word, is the expected one. Case does not matter."""

    expected: str
    options: tuple[str, ...]

    def __call__(self, answer: str) -> float:
        longest_first = sorted(self.options, key=len, reverse=True)
        pattern = r"(?<!\w)(?:" + "|".join(re.escape(option) for option in longest_first) + r")(?!\w)"
        found = re.search(pattern, answer, re.IGNORECASE)
        return float(found is not None and found[0].lower() == self.expected.lower())


@dataclass(frozen=True, slots=True)
class Contains:
    """1 when the expected text stands in the answer, as whole words. Case and runs of white space do not matter."""

    expected: str

    def __call__(self, answer: str) -> float:
        words = r"\s+".join(re.escape(word) for word in self.expected.split())
        return float(re.search(rf"(?<!\w){words}(?!\w)", answer, re.IGNORECASE) is not None)
