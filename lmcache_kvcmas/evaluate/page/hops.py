"""KL over hops: of the chain of agents, and of the workloads."""

from collections.abc import Sequence

from ..figures import ChainHop, Hop
from .curves import Line, hops_chart
from .documents import Document
from .kinds import Kind, kind_of
from .parts import Part, Section, slugs
from .scopes import edge_name
from .tables import chain_table, hops_table


def hops_section(document: Document) -> Section:
    parts = []
    if document.chain is not None and document.chain.summary:
        hops = document.chain.summary
        ticks = {h.hop: f"{h.hop}: {edge_name(h.edge)}" for h in sorted(hops, key=lambda h: h.hop)}
        title = "Chain of agents"
        parts.append(
            Part(
                title,
                (hops_chart("hops-chain", f"KL over hops: {title}", _chain_lines(hops), ticks),),
                (chain_table(f"{title}: every figure, hop by hop", hops),),
            )
        )
    names = slugs(document.workloads)
    for name, workload in document.workloads.items():
        if workload.hops:
            ticks = {hop: str(hop) for hop in sorted({h.hop for h in workload.hops})}
            title, lines = f"Workload {name}", _hop_lines(document, name)
            parts.append(
                Part(
                    title,
                    (hops_chart(f"hops-workload-{names[name]}", f"KL over hops: {title}", lines, ticks),),
                    (hops_table(f"{title}: every figure, hop by hop", workload.hops),),
                )
            )
    return Section(
        "hops",
        "Errors over hops",
        "Each agent takes over the cache that the one before it really had. A line that rises says that errors add up.",
        tuple(parts),
    )


def _chain_lines(hops: Sequence[ChainHop]) -> list[Line]:
    """``chained`` is what is served: it is ours."""
    kinds = {"chained": Kind.OURS, "gated": Kind.OURS, "context-free": Kind.REFERENCE}
    return [
        _line(mode, kinds.get(mode, Kind.OTHER), [h for h in hops if h.mode == mode])
        for mode in dict.fromkeys(h.mode for h in hops)
    ]


def _hop_lines(document: Document, name: str) -> list[Line]:
    workload = document.workloads[name]
    methods = dict.fromkeys(h.method for h in workload.hops if h.method != "dense")
    return [_line(m, kind_of(m, workload.summary.get(m)), [h for h in workload.hops if h.method == m]) for m in methods]


def _line(name: str, kind: Kind, hops: Sequence[ChainHop | Hop]) -> Line:
    rising = sorted(hops, key=lambda h: h.hop)
    return Line(
        name,
        kind,
        tuple(h.hop for h in rising),
        tuple(1e3 * h.kl for h in rising),
        tuple((1e3 * h.kl_ci[0], 1e3 * h.kl_ci[1]) for h in rising),
        dashed=name in ("none", "uncorrected"),
    )
