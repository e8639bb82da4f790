"""LMCache's YAML file, read by LMCache's own loader, and checked for what we lean on."""

import json
import os
from dataclasses import dataclass
from typing import Any

import yaml

from lmcache_kvcmas.config import Settings, refuse_misplaced
from lmcache_kvcmas.connectors.lmcache_api import LMCacheEngineConfig
from lmcache_kvcmas.connectors.redis_settings import RedisSettings
from lmcache_kvcmas.errors import ConfigError

PLUGIN = "kvcmas"
"""Our name in LMCache's ``remote_storage_plugins``."""

FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
EXTRA_VARIABLE = "LMCACHE_EXTRA_CONFIG"

_UNSUPPORTED = (
    "enable_pd",
    "enable_p2p",
    "enable_controller",
    "use_layerwise",
    "enable_async_loading",
    "remote_url",
    "storage_plugins",
    "gds_path",
    "maru_path",
)
"""Tiers that entries would silently not reach, and switches that change who owns the memory."""


@dataclass(frozen=True, slots=True)
class LMCacheConfig:
    """What the scheduler needs (``settings``, ``chunk_size``), and what opening the store needs besides."""

    settings: Settings
    chunk_size: int
    """Tokens of a base chunk."""
    cpu_bytes: int
    disk_bytes: int
    """0 without a disk tier."""
    redis: RedisSettings | None
    """None without a shared tier."""
    engine: Any
    """LMCache's own configuration object."""


def load_lmcache_config(path: str | None = None) -> LMCacheConfig:
    """Reads ``path``, else the file that ``LMCACHE_CONFIG_FILE`` names, else LMCache's environment variables.

    Allocates nothing. As with LMCache, ``LMCACHE_*`` variables go before the file;
    ``LMCACHE_EXTRA_CONFIG='{"kvcmas.rank": 16}'`` replaces the file's whole ``extra_config``.

    Raises:
        ConfigError: the file cannot be read, a setting of ours is unknown or impossible, or LMCache is set up in a way
            in which entries could not be kept.
    """
    path = path or os.environ.get(FILE_VARIABLE) or None
    _check_environment()
    given = _read(path) if path else {}
    refuse_misplaced(given)
    try:
        engine = LMCacheEngineConfig.from_file(path) if path else LMCacheEngineConfig.from_env()
        engine.update_config_from_env()
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"LMCache refuses {path or 'its environment variables'}: {error or 'see its log'}") from error

    chunk_size = _number(engine, given, "chunk_size", 16, 65536)
    cpu_gib = _number(engine, given, "max_local_cpu_size", 1e-3, 1 << 20)
    disk_gib = _number(engine, given, "max_local_disk_size", 0, 1 << 30) if engine.local_disk else 0
    if engine.local_cpu is not True:
        raise ConfigError(
            f"local_cpu is {given.get('local_cpu', engine.local_cpu)!r}. Allowed: true; entries live in that tier."
        )
    for name in _UNSUPPORTED:
        if getattr(engine, name, None):
            raise ConfigError(
                f"{name} is {getattr(engine, name)!r} in LMCache's settings. Allowed beside kvcmas: unset."
            )
    return LMCacheConfig(
        Settings.from_extra_config(engine.extra_config),
        int(chunk_size),
        int(cpu_gib * 2**30),
        int(disk_gib * 2**30),
        _redis(engine),
        engine,
    )


def _redis(engine: Any) -> RedisSettings | None:
    plugins = getattr(engine, "remote_storage_plugins", None) or []
    if plugins not in ([], [PLUGIN]):
        raise ConfigError(f"remote_storage_plugins is {plugins!r}. Allowed beside kvcmas: unset, or [{PLUGIN!r}].")
    given = [key for key in engine.extra_config or {} if str(key).startswith(f"remote_storage_plugin.{PLUGIN}.")]
    if given and not plugins:
        raise ConfigError(
            f"{given[0]} is set, but remote_storage_plugins is not. Allowed: `remote_storage_plugins: [{PLUGIN!r}]` "
            "beside it, or neither."
        )
    return RedisSettings.from_extra_config(engine.extra_config) if plugins else None


def _read(path: str) -> dict[Any, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            given = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FILE_VARIABLE} is {path!r}, which cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if given is not None and not isinstance(given, dict):
        raise ConfigError(f"{path} holds {type(given).__name__}. Allowed: a mapping of LMCache's settings.")
    extra = (given or {}).get("extra_config")
    if extra is not None and not isinstance(extra, dict):
        raise ConfigError(f"extra_config in {path} is {extra!r}. Allowed: a mapping, such as `kvcmas.rank: 32`.")
    return given or {}


def _check_environment() -> None:
    """LMCache only warns about JSON that it cannot read, and goes on without the settings in it."""
    text = os.environ.get(EXTRA_VARIABLE)
    if not text:
        return
    try:
        value = json.loads(text.strip().strip("'"))
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f'{EXTRA_VARIABLE} is {text!r}. Allowed: a JSON object, such as {{"kvcmas.rank": 32}}.')


def _number(engine: Any, given: dict[Any, Any], name: str, low: float, high: float) -> float:
    value = getattr(engine, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {given.get(name, value)!r}. Allowed: a number from {low:g} to {high:g}.")
    return value
