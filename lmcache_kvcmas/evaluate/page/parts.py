"""What the page is made of."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .canvas import Chart
from .tables import Table


@dataclass(frozen=True, slots=True)
class Part:
    title: str
    """Nothing: the section's own title says it."""
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    """Its id in the page."""
    title: str
    lead: str
    parts: tuple[Part, ...]
    marks: bool = False
    """Whether the three marks of methods have to be explained."""
    pairs: bool = False
    """Whether parts stand side by side."""


def slugs(names: Iterable[str]) -> dict[str, str]:
    """For file names and ids: letters, digits and hyphens, different for different names."""
    found: dict[str, str] = {}
    for i, name in enumerate(names, 1):
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or str(i)
        found[name] = slug if slug not in found.values() else f"{slug}-{i}"
    return found
