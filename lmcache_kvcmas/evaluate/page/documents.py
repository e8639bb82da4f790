"""The JSON files of `kvcmas evaluate`, `calibrate` and `ablate`, read and checked."""

from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError
from ..figures import Better, ChainHop, CurvePoint, HeldOut, Hop, Summary, Variant


class Row(msgspec.Struct, frozen=True):
    """One method on one context of one edge."""

    edge: str
    context: str
    method: str
    kl: float
    top1: float | None = None
    exact: bool | float | None = None
    tokens: int | None = None
    recompute: float | None = None
    state_bytes: float | None = None
    reference_prefills: float | None = None
    gate: str | None = None
    kv_error: float | None = None
    tail_error: float | None = None
    ehat: float | None = None
    res_k: float | None = None
    res_v: float | None = None
    seconds: float | None = None


class Chain(msgspec.Struct, frozen=True):
    summary: tuple[ChainHop, ...]


class Ranks(msgspec.Struct, frozen=True):
    """Effective ranks, layer by layer."""

    delta_k: tuple[float, ...]
    delta_v: tuple[float, ...]
    base_k: tuple[float, ...] = ()
    base_v: tuple[float, ...] = ()


class Workload(msgspec.Struct, frozen=True):
    summary: dict[str, Summary]
    traces: int | None = None
    seeds: int | None = None
    hops: tuple[Hop, ...] = ()


class Calibration(msgspec.Struct, frozen=True):
    budget: str
    theta: float | None
    curve: tuple[CurvePoint, ...]
    """Of development traces, by rising θ."""
    confidence: float | None = None
    """Share of resampled development traces on which θ is within the budget."""
    heldout: HeldOut | None = None
    file: str | None = None


class Run(msgspec.Struct, frozen=True):
    command: str | None = None
    date: str | None = None
    seconds: float | None = None
    cpus: int | None = None


class Document(msgspec.Struct, frozen=True):
    """What one file holds. All but the model may be missing."""

    model: str
    versions: dict[str, str] = {}
    run: Run = Run()
    settings: dict[str, Any] = {}
    """As the command wrote them: shown, and looked into for nothing but equality."""
    summary: dict[str, Summary] = {}
    edges: dict[str, dict[str, Summary]] = {}
    rows: tuple[Row, ...] = ()
    chain: Chain | None = None
    ranks: dict[str, Ranks] = {}
    workloads: dict[str, Workload] = {}
    better: tuple[Better, ...] = ()
    calibration: Calibration | None = None
    ablations: dict[str, tuple[Variant, ...]] = {}


def read_document(file: Path) -> Document:
    """Raise ConfigError, with the file and the field, for what is not such a document."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Document)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: not a document of kvcmas evaluate, calibrate or ablate: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
