"""Documents as `kvcmas evaluate`, `calibrate` and `ablate` write them, with made-up figures: all a page can show."""

import json
from pathlib import Path
from typing import Any

# method: KL in 1e-3 nats, recomputed, state in bytes, reference prefills
METHODS = {
    "none": (10.0, 0.0, 0, 0),
    "attention+head": (2.0, 0.15, 3_000_000, 0),
    "attention+head+gate": (0.5, 0.5, 3_000_000, 0),
    "rival": (6.0, 0.12, 1_000, 0),
    "near": (2.25, 0.2, 0, 0),
    "teacher": (1.25, 0.0, 500_000, 2),
    "dense": (0.0, 1.0, 0, 0),
}
MODEL = "models/Synthetic-1M"
EDGES = ("planner:solver", "solver:critic")


def summary(method: str, factor: float = 1.0, accuracy: float | None = None) -> dict[str, Any]:
    kl, recompute, state, references = METHODS[method]
    kl *= factor / 1e3
    return {
        "kl": kl,
        "kl_ci": [0.8 * kl, 1.25 * kl],
        "kl_vs_none": 100 * kl / factor,
        "kl_vs_none_ci": [80 * kl / factor, 125 * kl / factor],
        "top1": 0.9375,
        "exact": 0.5,
        "kv_error": 0.0125,
        "res_k": 0.375,
        "res_v": None,
        "ehat": None,
        "error_over_ehat": None,
        "ehat_rank_correlation": None,
        "recompute": recompute,
        "state_bytes": state,
        "reference_prefills": references,
        "accepted": 1.0,
        "reuse": None,
        "accuracy": accuracy,
        "accuracy_ci": None if accuracy is None else [accuracy - 0.125, accuracy + 0.125],
        "seconds": 1.5,
    }


def _row(edge: str, context: str, method: str) -> dict[str, Any]:
    known = summary(method)
    kept = ("kl", "top1", "kv_error", "res_k", "ehat", "recompute", "state_bytes", "reference_prefills", "seconds")
    return {"edge": edge, "context": context, "method": method, "tokens": 640, "exact": True, "gate": "accepted"} | {
        name: known[name] for name in kept
    }


def evaluated() -> dict[str, Any]:
    modes = {"uncorrected": 10.0, "chained": 2.0, "context-free": 5.0}
    return {
        "model": MODEL,
        "versions": {"lmcache-kvcmas": "0.0.0", "torch": "1.2.3"},
        "run": {
            "command": "kvcmas evaluate --synthetic",
            "date": "2000-01-01T00:00:00+00:00",
            "seconds": 90,
            "cpus": 2,
        },
        "settings": {"edges": [edge.split(":") for edge in EDGES], "anchors": 4, "rank": 8, "head": 16},
        "summary": {method: summary(method) for method in METHODS},
        "edges": {e: {m: summary(m, f) for m in METHODS} for e, f in zip(EDGES, (0.5, 1.5), strict=True)},
        "rows": [_row(edge, f"c{i}", method) for edge in EDGES for i in range(3) for method in METHODS],
        "chain": {
            "summary": [
                {"mode": m, "hop": h, "edge": e, "kl": kl * h / 1e3, "kl_ci": [kl / 2e3, kl / 4e2], "top1": 0.75}
                for m, kl in modes.items()
                for h, e in enumerate(EDGES, 1)
            ],
            "rows": [],
        },
        "ranks": {
            edge: {"delta_k": [4.5, 6.25], "delta_v": [8.5, 7.0], "base_k": [30, 31], "base_v": [50, 51]}
            for edge in EDGES
        },
        "workloads": {
            "quiz": {
                "traces": 12,
                "summary": {method: summary(method, 2.0, 0.625) for method in METHODS},
                "hops": [
                    {"method": m, "hop": h, "kl": kl * h / 1e3, "kl_ci": [kl / 2e3, kl / 4e2], "kl_vs_none": kl / 10}
                    for m, (kl, *_) in METHODS.items()
                    for h in (1, 2, 3)
                ],
            }
        },
        "better": [
            {
                "workload": None,
                "method": "attention+head",
                "than": "near",
                "measure": "kl",
                "difference": -0.00025,
                "ci": [-0.0004, -0.0001],
            }
        ],
    }


def calibrated() -> dict[str, Any]:
    curve = [(0.02, 0.0, 0.0), (0.03, 0.5, 1.0), (0.04, 0.75, 2.5), (0.06, 1.0, 5.0)]
    return {
        "model": MODEL,
        "calibration": {
            "budget": "kl<=0.003",
            "confidence": 0.9,
            "theta": 0.04,
            "file": "lmcache.yaml",
            "curve": [
                {
                    "theta": t,
                    "reuse": r,
                    "kl": k / 1e3,
                    "kl_vs_none": k / 10,
                    "accepted": r,
                    "at_most": round(1.12e-3 * k, 6),
                }
                for t, r, k in curve
            ],
            "heldout": {
                "reuse": 0.7,
                "kl": 0.00275,
                "kl_ci": [0.001, 0.0045],
                "kl_vs_none": 0.25,
                "accepted": 0.7,
                "accuracy": None,
                "within_budget": True,
            },
        },
    }


def ablated() -> dict[str, Any]:
    return {
        "model": MODEL,
        "ablations": {
            "rank": [
                {
                    "value": value,
                    "default": value == "8",
                    "kl_vs_none": ratio,
                    "kl_vs_none_ci": [ratio / 2, 2 * ratio],
                    "recompute": 0.15,
                    "state_bytes": 1000,
                }
                for value, ratio in (("4", 0.5), ("8", 0.25), ("16", 0.125))
            ]
        },
    }


def whole() -> dict[str, Any]:
    return evaluated() | calibrated() | ablated()


def written(folder: Path, *documents: dict[str, Any]) -> list[Path]:
    files = [folder / f"{i}.json" for i in range(len(documents))]
    for file, document in zip(files, documents, strict=True):
        file.write_text(json.dumps(document), "utf-8")
    return files
