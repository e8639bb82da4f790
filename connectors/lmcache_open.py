"""Opens the store that an LMCache file describes, and proves it before the engine relies on it."""

import copy
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmcache_kvcmas.connectors import lmcache_api as lm
from lmcache_kvcmas.connectors.disk_folder import DiskFolder
from lmcache_kvcmas.connectors.lmcache_config import LMCacheConfig
from lmcache_kvcmas.connectors.lmcache_store import LMCacheStore
from lmcache_kvcmas.connectors.lmcache_tiers import CPUTier, DiskTier
from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_names import Names
from lmcache_kvcmas.connectors.redis_tier import RedisTier
from lmcache_kvcmas.entries import Owner
from lmcache_kvcmas.errors import ConfigError, UnsupportedEngineError

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class StoreShape:
    """What LMCache wants to know of the caches; of one tensor-parallel rank."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    local_rank: int = 0
    """Rank on this machine."""
    local_size: int = 1

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of a full-width chunk: ``2·L·T·C`` values."""
        return 2 * self.layers * tokens * self.kv_heads * self.head_dim * self.dtype.itemsize


def open_store(config: LMCacheConfig, owner: Owner, shape: StoreShape, node: str = "") -> LMCacheStore:
    """A store with LMCache's CPU tier of ``max_local_cpu_size`` and, if configured, its disk tier and Redis.

    Allocates and clears the whole CPU budget at once (LMCache does). Each rank has a budget of its own. Redis need not
    be there yet. ``node`` is the name of this engine in the journal.

    Raises:
        ConfigError: the budget holds no chunk, the memory is not there, or the disk folder cannot be used.
        UnsupportedEngineError: this LMCache does not do what the store needs.
    """
    need = 4 * shape.chunk_bytes(config.chunk_size)
    if config.cpu_bytes < need:
        raise ConfigError(
            f"max_local_cpu_size is {config.cpu_bytes / _GIB:.4g} (GiB). Allowed for this model: at least "
            f"{need / _GIB:.4g}, four chunks of {config.chunk_size} tokens."
        )
    there = available_bytes()
    if there is not None and config.cpu_bytes > there:
        raise ConfigError(
            f"max_local_cpu_size is {config.cpu_bytes / _GIB:.4g} (GiB), and {there / _GIB:.4g} GiB of memory are "
            "available. Allowed: what is available; all of it is taken at start-up."
        )
    engine = copy.copy(config.engine)
    engine.remote_storage_plugins = None  # LMCache's remote backend would hold every entry a second time
    folder = None
    if config.disk_bytes:
        folder = _open_folder(config)
        engine.local_disk = str(folder.path)
    try:
        manager = _start_manager(engine, config.chunk_size, owner, shape)
        backends = manager.storage_backends
        cpu = CPUTier(backends["LocalCPUBackend"], config.cpu_bytes)
        disk = DiskTier(backends["LocalDiskBackend"], config.disk_bytes, folder) if folder else None
    except BaseException:
        if folder:
            folder.close()
        raise
    store = LMCacheStore(manager, owner, cpu, disk, _open_shared(config, owner, node))
    failed = store.prove()
    if failed:
        store.close()
        raise UnsupportedEngineError(f"LMCache {lm.installed_version()}'s CPU tier failed to {failed}")
    return store


def _open_shared(config: LMCacheConfig, owner: Owner, node: str) -> RedisTier | None:
    if config.redis is None:
        return None
    redis = config.redis
    names = Names(redis.prefix, owner, config.settings.salt)
    tier = RedisTier(RedisClient(redis), names, node, redis.max_inflight_bytes, config.settings.max_records)
    if redis.max_bytes and owner.tp_rank == 0:
        tier.keep_below(redis.max_bytes)
    return tier


def _open_folder(config: LMCacheConfig) -> DiskFolder:
    paths = str(config.engine.local_disk).split(",")
    try:
        if len(paths) > 1:
            raise OSError("several folders, where one is supported")
        return DiskFolder(paths[0].strip())
    except OSError as error:
        raise ConfigError(
            f"local_disk is {config.engine.local_disk!r}, which cannot be used: {error}. Allowed: one folder that "
            "this process may write, on a file system with locks."
        ) from error


def available_bytes() -> int | None:
    """Memory that may be taken, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _start_manager(engine: Any, chunk_size: int, owner: Owner, shape: StoreShape) -> Any:
    metadata = lm.LMCacheMetadata(
        model_name="kvcmas",
        world_size=owner.tp_size,
        local_world_size=shape.local_size,
        worker_id=owner.tp_rank,
        local_worker_id=shape.local_rank,
        kv_dtype=shape.dtype,
        kv_shape=(shape.layers, 2, chunk_size, shape.kv_heads, shape.head_dim),
        role="worker",
        chunk_size=chunk_size,
    )
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    made: list[Any] = []

    def start() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            made.append(lm.StorageManager(engine, metadata, lm.EventManager()))
        except BaseException as error:
            made.append(error)

    # The manager's thread would keep a process alive that ends without closing it; it inherits from a daemon here.
    thread = threading.Thread(target=start, name="kvcmas-open", daemon=True)
    thread.start()
    thread.join()
    if isinstance(made[0], RuntimeError | MemoryError):
        raise ConfigError(
            f"max_local_cpu_size is {engine.max_local_cpu_size:.4g} (GiB), which LMCache could not set up: {made[0]}"
        ) from made[0]
    if isinstance(made[0], BaseException):
        raise UnsupportedEngineError(f"LMCache {lm.installed_version()}'s StorageManager: {made[0]!r}") from made[0]
    return made[0]
