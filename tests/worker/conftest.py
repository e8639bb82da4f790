"""A real LMCache store for entries of small made-up caches."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_kvcmas.connectors.lmcache_config import load_lmcache_config
from lmcache_kvcmas.connectors.lmcache_open import StoreShape, open_store
from lmcache_kvcmas.connectors.lmcache_store import LMCacheStore
from lmcache_kvcmas.entries import Owner


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LMCacheStore]:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 16\nmax_local_cpu_size: 0.05\n")
    shape = StoreShape(layers=4, kv_heads=2, head_dim=16, dtype=torch.float32)
    opened = open_store(load_lmcache_config(str(file)), Owner("a model"), shape)
    yield opened
    opened.close()
