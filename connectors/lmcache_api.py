"""The only module that imports LMCache: its storage classes, from wherever this version keeps them, checked.

LMCache's in-process classes are not a public interface and do move. What we lean on is therefore named here, and a
version that lacks any of it is refused at start-up rather than met while serving.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

from lmcache_kvcmas.errors import UnsupportedEngineError

_TRIED = "Tried versions: 0.5.6, 0.5.7rc2."


def installed_version() -> str:
    """The version of LMCache that is installed.

    Raises:
        UnsupportedEngineError: none is.
    """
    try:
        return metadata.version("lmcache")
    except metadata.PackageNotFoundError as error:
        raise UnsupportedEngineError("LMCache is not installed. Allowed: lmcache 0.5.6.") from error


def _find(name: str, *modules: str) -> Any:
    """``name`` from the first of ``modules`` that has it: releases from 0.5.7 on moved some under lmcache.inprocess."""
    for path in modules:
        try:
            module: ModuleType = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise UnsupportedEngineError(f"LMCache {installed_version()}: {path} needs {error.name}") from error
            continue
        if hasattr(module, name):
            return getattr(module, name)
    raise UnsupportedEngineError(f"LMCache {installed_version()} has no {name} in {' or '.join(modules)}. {_TRIED}")


def _holds(constructor: Callable[..., Any], *attributes: str) -> None:
    source = inspect.getsource(constructor)
    missing = [name for name in attributes if name not in source]
    if missing:
        raise UnsupportedEngineError(
            f"LMCache {installed_version()}: {constructor.__qualname__} sets no {', '.join(missing)}. {_TRIED}"
        )


def _need(function: Callable[..., Any], *parameters: str) -> None:
    missing = set(parameters) - set(inspect.signature(function).parameters)
    if missing:
        raise UnsupportedEngineError(
            f"LMCache {installed_version()}: {function.__qualname__} takes no {', '.join(sorted(missing))}. {_TRIED}"
        )


installed_version()

CacheEngineKey = _find("CacheEngineKey", "lmcache.utils")
LMCacheEngineConfig = _find("LMCacheEngineConfig", "lmcache.v1.config", "lmcache.inprocess.v1.config")
LMCacheMetadata = _find("LMCacheMetadata", "lmcache.v1.metadata", "lmcache.inprocess.v1.metadata")
EventManager = _find("EventManager", "lmcache.v1.event_manager", "lmcache.inprocess.v1.event_manager")
MemoryFormat = _find("MemoryFormat", "lmcache.v1.memory_management")
OpType = _find("OpType", "lmcache.v1.cache_controller.message", "lmcache.inprocess.v1.cache_controller.message")
StorageManager = _find("StorageManager", "lmcache.v1.storage_backend.storage_manager")
LocalCPUBackend = _find("LocalCPUBackend", "lmcache.v1.storage_backend.local_cpu_backend")
LocalDiskBackend = _find("LocalDiskBackend", "lmcache.v1.storage_backend.local_disk_backend")

_need(CacheEngineKey, "model_name", "world_size", "worker_id", "chunk_hash", "dtype")
_need(StorageManager, "config", "metadata", "event_manager")
_need(StorageManager.allocate, "shapes", "dtypes", "fmt", "eviction", "busy_loop")
_need(StorageManager.close_backend, "backend_name")
_need(LocalCPUBackend.allocate, "shapes", "dtypes", "fmt", "eviction", "busy_loop")
_need(LocalCPUBackend.batched_submit_put_task, "keys", "memory_objs")
_need(LocalCPUBackend.get_blocking, "key")
_need(LocalDiskBackend.async_save_bytes_to_disk, "key", "memory_obj", "on_complete_callback")
_holds(StorageManager.__init__, "self.storage_backends", "self.thread", "self.loop")
_holds(
    LocalCPUBackend.__init__,
    "self.cache_policy",
    "self.hot_cache",
    "self.cpu_lock",
    "self.memory_allocator",
    "self.batched_msg_sender",
)
_holds(
    LocalDiskBackend.__init__,
    "self.dict",
    "self.disk_lock",
    "self.disk_worker",
    "self.path",
    "self.current_cache_size",
    "self.max_cache_size",
    "self.batched_msg_sender",
)


def remote_connector() -> Any:
    """The base class of remote connectors: looked up only where LMCache loads ours.

    Raises:
        UnsupportedEngineError: this version has it no more, or asks more of it.
    """
    found = _find("RemoteConnector", "lmcache.v1.storage_backend.connector.base_connector")
    _need(found, "config", "metadata")
    _need(found.batched_async_contains, "lookup_id", "keys", "pin")
    _need(found.batched_get_non_blocking, "lookup_id", "keys")
    return found


def _hide_from_scans() -> None:
    """Make llvmlite's library wrapper, which LMCache brings in through numba, deny having attributes like ``__dict__``.

    It answers every name with a function. vLLM's CPU worker looks through the ``__dict__`` of all that is loaded, and
    would die on that one: a second engine in a process, or one whose connector was imported first, would not start.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    wrapper: Any = type(getattr(ffi, "lib", None))
    original = wrapper.__dict__.get("__getattr__")
    if original is None or hasattr(original, "__kvcmas__"):
        return

    def get(self: Any, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return original(self, name)

    get.__kvcmas__ = True  # type: ignore[attr-defined]
    wrapper.__getattr__ = get


_hide_from_scans()
