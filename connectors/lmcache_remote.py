"""A remote storage plugin of LMCache: its plain traffic through our Redis client.

One key an entry, with what it is in front of it, a checksum, a prefix and a TTL: no entry is ever half there. What is
damaged, cut short or another key's is a miss and goes. A failing server costs one time-out, then nothing until it is
back.
"""

import asyncio
import logging
import math
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import xxhash

from lmcache_kvcmas.connectors import lmcache_api as lm
from lmcache_kvcmas.connectors.redis_client import RedisClient, RedisUnavailable
from lmcache_kvcmas.connectors.redis_settings import RedisSettings
from lmcache_kvcmas.entry_header import DTYPES, NAMES

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
Many = list[Any]
"""Of keys, or of memory objects and Nones."""
Found = list[bool]
_Described = tuple[str, list[tuple[list[int], str]], int]
"""Format, shape and dtype of each group, bytes in all."""

HEAD = 512
"""Bytes in front of the payload: magic, version, length of the description, checksum, description (msgpack), zeros."""
_MAGIC, _VERSION = b"KVMR", 1
_FIXED = struct.Struct("<4sHHQ")
_MAX_DIMS = 8
_MAX_GROUPS = 16


class _Head(NamedTuple):
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    format: Any
    size: int
    checksum: int
    described: bytes


def _checksum(name: bytes, described: bytes, payload: memoryview) -> int:
    """Of the key too: an entry under another's key is damaged."""
    state = xxhash.xxh3_64(name + b"\0" + described)
    state.update(payload)
    return state.intdigest()


def _pack(name: bytes, obj: Any, payload: memoryview) -> bytes:
    """The head of an entry.

    Raises:
        ValueError: it has a dtype or a shape that cannot be written down.
    """
    groups = zip(obj.get_shapes(), obj.get_dtypes(), strict=True)
    rows = [(list(shape), NAMES.get(dtype, "")) for shape, dtype in groups]
    described = msgspec.msgpack.encode((obj.get_memory_format().name, rows, payload.nbytes))
    head = _FIXED.pack(_MAGIC, _VERSION, len(described), _checksum(name, described, payload)) + described
    if len(head) > HEAD or _read_head(head.ljust(HEAD, b"\0")) is None:
        raise ValueError(f"an entry of {rows!r:.200} cannot be described")
    return head.ljust(HEAD, b"\0")


def _read_head(head: bytes) -> _Head | None:
    """What it says, if it is one that :func:`_pack` writes. Every field is checked; nothing is allocated."""
    try:
        magic, version, length, checksum = _FIXED.unpack_from(head)
        described = head[_FIXED.size : _FIXED.size + length]
        if (magic, version, len(head)) != (_MAGIC, _VERSION, HEAD) or len(described) != length:
            return None
        name, rows, size = msgspec.msgpack.decode(described, type=_Described)
        if not 0 < len(rows) <= _MAX_GROUPS:
            return None
        if any(not 0 < len(shape) <= _MAX_DIMS or any(not 0 < n < 1 << 40 for n in shape) for shape, _ in rows):
            return None
        dtypes = [DTYPES[dtype] for _, dtype in rows]
        if size != sum(math.prod(shape) * dtype.itemsize for (shape, _), dtype in zip(rows, dtypes, strict=True)):
            return None
        return _Head([torch.Size(shape) for shape, _ in rows], dtypes, lm.MemoryFormat[name], size, checksum, described)
    except (KeyError, struct.error, msgspec.DecodeError):
        return None


_Base: Any = lm.remote_connector()


class KVCMASRemoteConnector(_Base):
    """What LMCache makes of ``remote_storage_plugins: ["kvcmas"]``. Failures are misses; each cause is logged once.

    Raises:
        ConfigError: a setting is unknown or impossible. (LMCache logs it and goes on without this tier.)
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any) -> None:
        self._settings = RedisSettings.from_extra_config(config.extra_config if config else None)
        metadata = getattr(local_cpu_backend, "metadata", None)
        if metadata is not None:
            super().__init__(config, metadata)
        self._memory = local_cpu_backend
        self._client = RedisClient(self._settings)
        self._threads = ThreadPoolExecutor(self._settings.connections, thread_name_prefix="kvcmas-remote")
        self._told: object = None

    # --- one and many: LMCache asks for both, awaited and not ---

    async def exists(self, key: Any) -> bool:
        return (await self._aside(self._whole, [key]))[0]

    def exists_sync(self, key: Any) -> bool:
        return self._whole([key])[0]

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Many) -> int:
        return _leading(self._whole(keys))

    async def batched_async_contains(self, lookup_id: str, keys: Many, pin: bool = False) -> int:
        return _leading(await self._aside(self._whole, keys))

    async def get(self, key: Any) -> Any:
        return (await self._aside(self._get, [key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Many) -> Many:
        return await self._aside(self._get, keys)

    async def batched_get_non_blocking(self, lookup_id: str, keys: Many) -> Many:
        objs = await self._aside(self._get, keys)
        leading = _leading([obj is not None for obj in objs])
        for obj in objs[leading:]:
            if obj is not None:
                obj.ref_count_down()
        return objs[:leading]

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self._aside(self._put, [key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Many, memory_objs: Many) -> None:
        await self._aside(self._put, keys, memory_objs)

    def remove_sync(self, key: Any) -> bool:
        return bool(self._try(lambda: self._client.remove_many([self._name(key)]), 0))

    async def list(self) -> Many:
        start = self._settings.prefix.encode() + b":lmcache:"
        names = await self._aside(self._try, lambda: [*self._client.scan(start + b"*")], [])
        return [name.removeprefix(start).decode(errors="replace") for name in names]

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """0 if the server answers."""
        return await self._aside(self._try, lambda: 0 * int(self._client.ping()), 1)

    async def close(self) -> None:
        """Ends at once; what is under way fails."""
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- inside ---

    def _name(self, key: Any) -> bytes:
        return f"{self._settings.prefix}:lmcache:{key.to_string()}".encode()

    async def _aside(self, work: Callable[..., T], *arguments: Any) -> T:
        """``work`` on a thread of ours: LMCache's event loop serves others meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _whole(self, keys: Sequence[Any]) -> Found:
        """Which entries are there in full length; damage inside them is found by reading."""
        names = [self._name(key) for key in keys]
        peeked = self._try(lambda: self._client.peek_many(names, HEAD), [(b"", 0)] * len(names))
        heads = [(_read_head(head), size) for head, size in peeked]
        return [head is not None and head.size + HEAD == size for head, size in heads]

    def _get(self, keys: Sequence[Any]) -> Many:
        names = [self._name(key) for key in keys]
        objs: Many = [None] * len(names)
        heads: dict[int, _Head] = {}
        damaged: Many = []

        def allocate(index: int, size: int, head: bytes) -> memoryview | None:
            known = _read_head(head)
            if known is None or known.size != size:
                damaged.append(names[index])
                return None
            obj = self._memory.allocate(known.shapes, known.dtypes, known.format, eviction=True, busy_loop=False)
            if obj is None:
                return None
            objs[index], heads[index] = obj, known
            return _view(obj)

        found: Found = self._try(lambda: self._client.read_headed(names, HEAD, allocate), [False] * len(names))
        for index, obj in enumerate(objs):
            if obj is None:
                continue
            whole = found[index]
            if whole and _checksum(names[index], heads[index].described, _view(obj)) != heads[index].checksum:
                damaged.append(names[index])
                whole = False
            if not whole:
                obj.ref_count_down()
                objs[index] = None
        if damaged:
            self._client.stats["damaged"] += len(damaged)
            _LOG.warning(
                "%d damaged entries in Redis were misses and are removed, such as %r", len(damaged), damaged[0]
            )
            self._try(lambda: self._client.remove_many(damaged), 0)
        return objs

    def _put(self, keys: Sequence[Any], objs: Sequence[Any]) -> None:
        items: Many = []
        for key, obj in zip(keys, objs, strict=True):
            name, payload = self._name(key), _view(obj)
            try:
                items.append((name, (_pack(name, obj, payload), payload)))
            except ValueError as error:
                self._tell("unstorable", error)
        self._try(lambda: self._client.put_many(items), None)

    def _try(self, work: Callable[[], T], instead: T) -> T:
        try:
            result = work()
        except RedisUnavailable as error:
            self._tell(error.cause, error)
            return instead
        self._told = None
        return result

    def _tell(self, cause: object, error: Exception) -> None:
        """Logs it once, until it changes; an open breaker only repeats what opened it."""
        if cause != self._told and getattr(cause, "value", "") != "open_breaker":
            self._told = cause
            _LOG.warning("LMCache's entries are not stored in Redis or read from it (told once): %s", error)


def _view(obj: Any) -> memoryview:
    """The bytes of a memory object. It must be held for as long as they are used."""
    return memoryview(obj.raw_data[: obj.get_size()].numpy())


def _leading(found: Found) -> int:
    return found.index(False) if False in found else len(found)
