"""The shared tier that an LMCache file names, for tools that look at it from outside."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lmcache_kvcmas.connectors.lmcache_config import FILE_VARIABLE, PLUGIN, LMCacheConfig, load_lmcache_config
from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_settings import PREFIX, RedisSettings
from lmcache_kvcmas.errors import ConfigError

_PATIENCE_MS = 10_000  # a person waits longer than a request does

NO_REDIS = f"`remote_storage_plugins: [{PLUGIN}]` and, under extra_config, `{PREFIX}url: redis://host:6379`"
"""What to set."""


@dataclass(frozen=True, slots=True)
class Opened:
    config: LMCacheConfig
    settings: RedisSettings
    client: RedisClient


@contextmanager
def open_redis(file: Path | None) -> Iterator[Opened]:
    """The client of the file's shared tier. Connects when it is first used.

    Raises:
        ConfigError: the file cannot be used, or names no Redis.
    """
    config = load_lmcache_config(str(file) if file else None)
    if config.redis is None:
        where = file or f"the file that {FILE_VARIABLE} names"
        raise ConfigError(f"no Redis is configured in {where}. Set {NO_REDIS}.")
    client = patient(config.redis)
    try:
        yield Opened(config, config.redis, client)
    finally:
        client.close()


def patient(settings: RedisSettings) -> RedisClient:
    """A client that gives a batch 10 s, where an engine's gives it ``timeout_ms``."""
    return RedisClient(replace(settings, timeout_ms=max(settings.timeout_ms, _PATIENCE_MS)))
