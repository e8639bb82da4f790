"""What methods are compared on: the edges, and each workload."""

from typing import NamedTuple

from .documents import Document
from .kinds import Entry, ordered


class Scope(NamedTuple):
    workload: str | None
    """None: the edges."""
    title: str
    entries: list[Entry]
    """`ordered`."""
    measured: str
    """Over what: "30 transitions", or nothing where the document does not say."""


def scopes(document: Document) -> list[Scope]:
    """The edges first."""
    found = []
    if document.summary or len(document.edges) == 1:
        summaries = document.summary or next(iter(document.edges.values()))
        found.append(Scope(None, edges_title(document), ordered(summaries), _transitions(document)))
    for name, workload in document.workloads.items():
        if workload.summary:
            traces = "" if workload.traces is None else f"{workload.traces} traces"
            traces += f", {workload.seeds} seeds" if traces and (workload.seeds or 0) > 1 else ""
            found.append(Scope(name, f"Workload {name}", ordered(workload.summary), traces))
    return found


def edges_title(document: Document) -> str:
    if len(document.edges) == 1:
        return f"Edge {edge_name(next(iter(document.edges)))}"
    return f"All {len(document.edges)} edges" if document.edges else "All edges"


def edge_name(edge: str) -> str:
    return edge.replace(":", " → ", 1)


def _transitions(document: Document) -> str:
    transitions = {(row.edge, row.context) for row in document.rows}
    return f"{len(transitions)} transitions" if transitions else ""
