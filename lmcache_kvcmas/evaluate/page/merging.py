"""Several documents made into one. What two of them say differently is an error: a report shows one figure."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from ...errors import ConfigError
from ..figures import Summary
from .documents import Chain, Document, Workload

Value = TypeVar("Value")


class Named(NamedTuple):
    file: Path
    document: Document


class Merged(NamedTuple):
    document: Document
    """All figures. ``run``, ``versions`` and ``settings`` stay with the ``sources``."""
    sources: tuple[Named, ...]
    notes: tuple[str, ...]
    """What a reader of the merged figures has to know."""


def merge(sources: Iterable[Named]) -> Merged:
    """Raise ConfigError where models or figures differ, or where there is nothing to show."""
    sources = _apart(tuple(sources))
    for named in sources[1:]:
        if Path(named.document.model).name != Path(sources[0].document.model).name:
            raise ConfigError(
                f"{named.file}: model is {named.document.model!r}, in {sources[0].file} it is "
                f"{sources[0].document.model!r}; a report is of one model"
            )
    summary, notes = _summary(sources)
    document = Document(
        model=sources[0].document.model,
        summary=summary,
        edges=_edges(sources),
        rows=tuple(dict.fromkeys(row for named in sources for row in named.document.rows)),
        chain=_chain(sources),
        ranks=_by_key("ranks", [(n.file, n.document.ranks) for n in sources]),
        workloads=_workloads(sources),
        better=tuple(dict.fromkeys(better for named in sources for better in named.document.better)),
        calibration=_one("calibration", [(n.file, n.document.calibration) for n in sources]),
        ablations=_by_key("ablations", [(n.file, n.document.ablations) for n in sources]),
    )
    if document == Document(model=document.model):
        raise ConfigError(f"{', '.join(str(n.file) for n in sources)}: no figures to report")
    return Merged(document, sources, (*notes, *_other_settings(sources)))


def _apart(sources: tuple[Named, ...]) -> tuple[Named, ...]:
    """`calibrate` serves traces of its own: its workloads are others than those of the same name in other files."""
    apart = []
    for named in sources:
        document = named.document
        others = {w for other in sources if other.document.calibration is None for w in other.document.workloads}
        names = {w: f"{w}, {named.file.stem}" for w in document.workloads if w in others and document.calibration}
        if names:
            workloads = {names.get(name, name): workload for name, workload in document.workloads.items()}
            better = tuple(
                msgspec.structs.replace(b, workload=names.get(b.workload or "", b.workload)) for b in document.better
            )
            document = msgspec.structs.replace(document, workloads=workloads, better=better)
        apart.append(Named(named.file, document))
    return tuple(apart)


def _edges(sources: tuple[Named, ...]) -> dict[str, dict[str, Summary]]:
    edges = dict.fromkeys(edge for named in sources for edge in named.document.edges)
    return {e: _methods(f"edges.{e}", [(n.file, n.document.edges.get(e, {})) for n in sources]) for e in edges}


def _summary(sources: tuple[Named, ...]) -> tuple[dict[str, Summary], tuple[str, ...]]:
    """Means over all edges; left out where the files' edges differ, because nothing was measured over all of them."""
    over = {frozenset(named.document.edges) for named in sources if named.document.summary}
    if len(over) > 1:
        return {}, ("The files cover different edges, so there is no mean over all of them.",)
    return _methods("summary", [(n.file, n.document.summary) for n in sources]), ()


def _workloads(sources: tuple[Named, ...]) -> dict[str, Workload]:
    merged = {}
    for name in dict.fromkeys(name for named in sources for name in named.document.workloads):
        given = [(n.file, n.document.workloads[name]) for n in sources if name in n.document.workloads]
        hops = _by_key(
            f"workloads.{name}.hops", [(file, {f"{h.method} {h.hop}": h for h in w.hops}) for file, w in given]
        )
        merged[name] = Workload(
            summary=_methods(f"workloads.{name}.summary", [(file, w.summary) for file, w in given]),
            traces=_one(f"workloads.{name}.traces", [(file, w.traces) for file, w in given]),
            seeds=_one(f"workloads.{name}.seeds", [(file, w.seeds) for file, w in given]),
            hops=tuple(hops.values()),
        )
    return merged


def _chain(sources: tuple[Named, ...]) -> Chain | None:
    return _one("chain", [(n.file, n.document.chain) for n in sources])


def _methods(field: str, given: Sequence[tuple[Path, Mapping[str, Summary]]]) -> dict[str, Summary]:
    """By method. Times are of a run, not of a method: they may differ."""
    timeless = [(file, {m: msgspec.structs.replace(s, seconds=None) for m, s in some.items()}) for file, some in given]
    _by_key(field, timeless)
    return {method: summary for _, some in reversed(given) for method, summary in some.items()}


def _by_key(field: str, given: Sequence[tuple[Path, Mapping[str, Value]]]) -> dict[str, Value]:
    keys = dict.fromkeys(key for _, some in given for key in some)
    merged = {}
    for key in keys:
        value = _one(f"{field}.{key}", [(file, some.get(key)) for file, some in given])
        if value is not None:
            merged[key] = value
    return merged


def _one(field: str, given: Sequence[tuple[Path, Value | None]]) -> Value | None:
    found = [(file, value) for file, value in given if value is not None]
    for file, value in found[1:]:
        if value != found[0][1]:
            raise ConfigError(f"{file}: {field} differs from that in {found[0][0]}; leave one of the files out")
    return found[0][1] if found else None


def _other_settings(sources: tuple[Named, ...]) -> list[str]:
    notes = []
    for setting in ("anchors", "rank", "head"):
        values = {
            named.file.name: named.document.settings[setting]
            for named in sources
            if setting in named.document.settings and (named.document.edges or named.document.workloads)
        }
        if len({str(value) for value in values.values()}) > 1:
            which = ", ".join(f"{value} in {file}" for file, value in values.items())
            notes.append(f"The files were not run alike: {setting} is {which}.")
    return notes
