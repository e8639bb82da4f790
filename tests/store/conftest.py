"""Opens small stores, and closes them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_store import MIB, OWNER, SHAPE, OpenStore

from lmcache_kvcmas.connectors.lmcache_config import load_lmcache_config
from lmcache_kvcmas.connectors.lmcache_open import open_store
from lmcache_kvcmas.connectors.lmcache_store import LMCacheStore
from lmcache_kvcmas.entries import Owner


@pytest.fixture
def open_small(tmp_path: Path) -> Iterator[OpenStore]:
    """Opens stores of ``cpu`` (and ``disk``) bytes; they are closed at the end."""
    opened: list[LMCacheStore] = []

    def open_one(cpu: int = 8 * MIB, disk: int = 0, owner: Owner = OWNER) -> LMCacheStore:
        path = tmp_path / f"lmcache{len(opened)}.yaml"
        path.write_text(
            f"chunk_size: 16\nmax_local_cpu_size: {cpu / 2**30}\n"
            + (f"local_disk: file://{tmp_path}/disk\nmax_local_disk_size: {disk / 2**30}\n" if disk else "")
        )
        opened.append(open_store(load_lmcache_config(str(path)), owner, SHAPE))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()
