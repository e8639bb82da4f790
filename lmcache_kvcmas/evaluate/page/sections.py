"""The page's parts in their order. A part for which the documents hold nothing is not there."""

from collections.abc import Iterator, Sequence

from .ablations import ablation_chart
from .canvas import Chart
from .comparison import accuracy_chart, kl_chart, memory_chart
from .curves import ranks_chart
from .documents import Calibration, Document
from .hops import hops_section
from .kinds import ordered
from .numbers import percent, tick
from .parts import Part, Section, slugs
from .reuse import chosen_point, reuse_charts
from .scopes import Scope, edge_name, scopes
from .tables import (
    ablation_table,
    calibration_table,
    ranks_table,
    rows_table,
    summary_table,
)
from .tradeoff import tradeoff_chart

_MOST_ROWS = 1500
"""More would make the page slow to load; they are in the documents."""


def sections(document: Document) -> list[Section]:
    built = (
        _methods(document),
        _tradeoff(document),
        _accuracy(document),
        hops_section(document),
        _calibration(document),
        _memory(document),
        _ranks(document),
        _ablations(document),
        _rows(document),
    )
    return [section for section in built if section is not None and section.parts]


def _methods(document: Document) -> Section:
    parts = [_compared(scope, document, first=i == 0) for i, scope in enumerate(scopes(document))]
    if len(document.edges) > 1:
        slug = slugs(document.edges)
        each = ((edge, ordered(summaries)) for edge, summaries in document.edges.items())
        parts[1:1] = [
            Part(
                f"Edge {edge_name(edge)}",
                (kl_chart(f"kl-edge-{slug[edge]}", f"KL on edge {edge_name(edge)}", entries),),
                (summary_table(f"Edge {edge_name(edge)}: every figure", entries),),
                folded=bool(document.summary),
            )
            for edge, entries in each
        ]
    return Section(
        "methods",
        "Methods compared",
        "KL to dense prefill over the tokens of dense prefill's own answer: less is better, and dense prefill itself "
        "is 0. Lines are 95% intervals. The dashed line at 1 is rotation only: the source agent's cache, moved and "
        "nothing else. Recomputed is the share of tokens × layers.",
        tuple(parts),
        marks=True,
    )


def _compared(scope: Scope, document: Document, first: bool) -> Part:
    chart = kl_chart(f"kl-{_slug(scope, document)}", f"KL: {scope.title}", scope.entries)
    return Part(_titled(scope), (chart,), (summary_table(f"{scope.title}: every figure", scope.entries, open=first),))


def _tradeoff(document: Document) -> Section:
    found = scopes(document)
    charts = [
        (s, tradeoff_chart(f"tradeoff-{_slug(s, document)}", f"KL against recompute: {s.title}", s.entries))
        for s in found
    ]
    return Section(
        "tradeoff",
        "What recompute buys",
        "Further left is cheaper, further down is closer to dense prefill. The dashed line joins the methods that no "
        "other beats in both; what needs a further prefill of the same context is not among them.",
        tuple(Part(s.title, (c,)) for s, c in charts if c is not None),
        marks=True,
    )


def _accuracy(document: Document) -> Section:
    charts = [
        (s, accuracy_chart(f"accuracy-{_slug(s, document)}", f"Correct answers: {s.title}", s.entries))
        for s in scopes(document)
    ]
    return Section(
        "accuracy",
        "Task accuracy",
        "Share of traces whose last answer is right, with 95% intervals. The dashed line is dense prefill. The axis "
        "does not begin at 0.",
        tuple(Part(_titled(s), (c,)) for s, c in charts if c is not None),
        marks=True,
    )


def _titled(scope: Scope) -> str:
    return f"{scope.title}, {scope.measured}" if scope.measured else scope.title


def _calibration(document: Document) -> Section | None:
    calibration = document.calibration
    if calibration is None or not calibration.curve:
        return None
    where = f" It was written to {calibration.file}." if calibration.file else ""
    theta = "No threshold meets it." if calibration.theta is None else f"It chose θ = {tick(calibration.theta)}."
    return Section(
        "calibration",
        "What reuse costs",
        "The gate reuses what it expects to be less wrong than θ; every point is a θ, on development traces. "
        f"The budget is {calibration.budget}{_surely(calibration)}. {theta}{where}",
        (
            Part(
                "",
                tuple(reuse_charts(calibration)),
                (calibration_table("The curve: every figure", calibration, chosen_point(calibration)),),
            ),
        ),
    )


def _surely(calibration: Calibration) -> str:
    if calibration.confidence is None:
        return ""
    return f", to be kept on {percent(calibration.confidence)} of resampled traces: the dashed line"


def _memory(document: Document) -> Section:
    charts = [
        (s, memory_chart(f"memory-{_slug(s, document)}", f"State kept: {s.title}", s.entries)) for s in scopes(document)
    ]
    return Section(
        "memory",
        "Memory",
        "What a method keeps for an edge and a run, beyond the source's own cache.",
        tuple(Part(s.title, (c,)) for s, c in charts if c is not None),
        marks=True,
    )


def _ranks(document: Document) -> Section:
    slug = slugs(document.ranks)
    parts = (
        Part(
            f"Edge {edge_name(edge)}",
            (ranks_chart(f"ranks-{slug[edge]}", f"Effective rank: edge {edge_name(edge)}", ranks),),
            (ranks_table(f"Edge {edge_name(edge)}: every rank", ranks),),
        )
        for edge, ranks in document.ranks.items()
        if ranks.delta_k or ranks.delta_v
    )
    return Section(
        "ranks",
        "Effective rank by layer",
        "How many directions the difference between two agents' caches (ΔK, ΔV) takes, beside those of the caches "
        "themselves. Where Δ is low, few numbers hold it.",
        tuple(parts),
        pairs=True,
    )


def _ablations(document: Document) -> Section:
    slug = slugs(document.ablations)
    parts = (
        Part(
            setting,
            (ablation_chart(f"ablation-{slug[setting]}", f"Ablation: {setting}", variants),),
            (ablation_table(f"Ablation of {setting}: every figure", variants),),
        )
        for setting, variants in document.ablations.items()
        if variants
    )
    return Section(
        "ablations",
        "Ablations",
        "One setting varied at a time, with all others at their defaults; less is better. Lines are 95% intervals.",
        tuple(parts),
        pairs=True,
    )


def _rows(document: Document) -> Section | None:
    if not document.rows:
        return None
    lead = "Every method on every context."
    if len(document.rows) > _MOST_ROWS:
        return Section(
            "rows",
            "Single transitions",
            f"{lead} These are {len(document.rows)} rows, too many for a page: read them in the JSON files.",
            (Part(""),),
        )
    return Section(
        "rows",
        "Single transitions",
        lead,
        (Part("", (), (rows_table(f"All {len(document.rows)} rows", document.rows),)),),
    )


def charts(found: Sequence[Section]) -> Iterator[Chart]:
    for section in found:
        for part in section.parts:
            yield from part.charts


def _slug(scope: Scope, document: Document) -> str:
    return "edges" if scope.workload is None else f"workload-{slugs(document.workloads)[scope.workload]}"
