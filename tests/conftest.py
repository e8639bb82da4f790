"""What all tests share: the real weights."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

MODEL = Path(__file__).parent.parent / ".cache" / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    if not (MODEL / "config.json").is_file():
        pytest.fail(f"{MODEL} is missing: `make setup` unpacks it")
    return MODEL
