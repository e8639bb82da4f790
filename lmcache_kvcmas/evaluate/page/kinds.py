"""Methods in the order in which a reader compares them."""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from ..figures import Summary


class Kind(Enum):
    """How a method is marked. The values are CSS classes."""

    OURS = "ours"
    OTHER = "other"
    REFERENCE = "reference"
    """Needs a prefill of this very context beyond the source's, so that it saves none the first time."""


class Entry(NamedTuple):
    method: str
    kind: Kind
    summary: Summary


def is_ours(method: str) -> bool:
    return method.startswith("attention+")


def kind_of(method: str, summary: Summary | None = None) -> Kind:
    if is_ours(method):
        return Kind.OURS
    return Kind.REFERENCE if summary is not None and summary.reference_prefills > 0 else Kind.OTHER


def ordered(summaries: Mapping[str, Summary]) -> list[Entry]:
    """By KL; what needs a reference prefill behind all others."""
    entries = [Entry(method, kind_of(method, summary), summary) for method, summary in summaries.items()]
    return sorted(entries, key=lambda e: (e.kind is Kind.REFERENCE, e.summary.kl))


def predictions(entries: list[Entry]) -> list[Entry]:
    """Those that are an alternative to dense prefill: no reference prefill, and not dense prefill itself."""
    return [e for e in entries if e.kind is not Kind.REFERENCE and e.method != "dense"]
