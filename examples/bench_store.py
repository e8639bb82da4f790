"""How fast entries come back from Redis, and how many bytes several agents of one context take. No engine.

Reading: entries of 4 MiB are written through a real store to a redis-server on this machine, and read back into
LMCache's memory, checksums verified, as a prefetch does it; in turn with redis-py's own GETs of the same bytes, and
with LMCache's own Redis connector. Ratios of one run: machines are noisy.

Bytes: entries as they are laid out, headers included, of one base at full width and three rank-32 differences, against
four caches at full width.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from redis import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lmcache_kvcmas import codecs
from lmcache_kvcmas.connectors import lmcache_api as lm
from lmcache_kvcmas.connectors.lmcache_config import load_lmcache_config
from lmcache_kvcmas.connectors.lmcache_open import StoreShape, open_store
from lmcache_kvcmas.connectors.redis_names import Names
from lmcache_kvcmas.entries import EntryKind, Meta, Owner, TensorSpec, encode_into, lay_out
from lmcache_kvcmas.factors import Factors
from lmcache_kvcmas.keys import KeySpace
from lmcache_kvcmas.learner import named
from lmcache_kvcmas.manifest import Needed
from lmcache_kvcmas.store import NotHad

MIB = 2**20
WHOLE = 1024 * MIB
ENTRY = 4 * MIB
SHAPE = StoreShape(layers=16, kv_heads=4, head_dim=128, dtype=torch.bfloat16)
"""128 tokens of it take 4 MiB."""
TOKENS = 128
TOGETHER = 16
"""Entries that are asked for at once: a context of 4,096 tokens, in chunks of 256."""
REPEATS = 5
OWNER = Owner("bench")
BARS = {"read_vs_raw": 0.8, "read_vs_lmcache": 1.5, "agents4_smollm2": 0.45, "agents4_c1024": 0.3}

CONTEXT, CHUNK, AGENTS, RANK = 4096, 256, 4, 32


class Model(NamedTuple):
    layers: int
    heads: int
    dim: int


MODELS = {"smollm2": Model(30, 3, 64), "c1024": Model(32, 8, 128)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"), help="where bench.json goes; what else is in it stays")
    parser.add_argument("--redis-server", type=Path, default=found_server(), help="the program; default: %(default)s")
    arguments = parser.parse_args()
    console = Console()
    with console.status("laying out entries …"):
        sizes = {f"agents4_{name}{codec}": r for name, m in MODELS.items() for codec, r in store_ratios(m).items()}
    show_sizes(sizes, console)
    result: dict[str, object] = {"store": sizes}
    if arguments.redis_server is None:
        console.print("reading from Redis was not measured: there is no redis-server on the PATH; see --redis-server")
    else:
        with tempfile.TemporaryDirectory() as folder:
            result["redis"] = read_ratios(arguments.redis_server, Path(folder), console)
    file = arguments.out / "bench.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(earlier(file) | result, indent=1) + "\n", "utf-8")


def found_server() -> Path | None:
    found = shutil.which("redis-server") or shutil.which("redis-server", path=str(Path(sys.executable).parent))
    return Path(found) if found else None


def earlier(file: Path) -> dict[str, object]:
    """What other benchmarks wrote there."""
    try:
        there = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return there if isinstance(there, dict) else {}


# --- reading ---


class Reader(NamedTuple):
    """One way to read entries back."""

    name: str
    read: Callable[[Sequence[int]], None]
    forget: Callable[[], None]
    """Makes this node's memory as it was, untimed."""


def read_ratios(program: Path, folder: Path, console: Console) -> dict[str, float]:
    count = fitting(console)
    with ExitStack() as opened:
        port = opened.enter_context(server(program, folder))
        ways = [ours(opened, folder, port, count), raw(opened, port, count), lmcaches(folder, port, count)]
        batches = [range(begin, min(count, begin + TOGETHER)) for begin in range(0, count, TOGETHER)]
        seconds: dict[str, list[float]] = {way.name: [] for way in ways}
        with Progress(console=console) as progress:
            bar = progress.add_task("reading from Redis", total=(REPEATS + 1) * len(ways))
            for repeat in range(REPEATS + 1):
                for way in ways:
                    begun = time.perf_counter()
                    for batch in batches:
                        way.read(batch)
                    took = time.perf_counter() - begun
                    way.forget()
                    if repeat:  # the first connects, and touches the memory for the first time
                        seconds[way.name].append(took)
                    progress.advance(bar)
    medians = {name: statistics.median(all_of) for name, all_of in seconds.items()}
    gib = count * ENTRY / 2**30
    table = Table(title=f"{gib:.3g} GiB in entries of 4 MiB from Redis, {TOGETHER} at once, medians of {REPEATS}")
    for column in ("", "GiB/s", "slowest … fastest"):
        table.add_column(column, justify="right" if column else "left")
    for name, all_of in seconds.items():
        spread = f"{gib / max(all_of):.2f} … {gib / min(all_of):.2f}"
        table.add_row(name, f"{gib / medians[name]:.2f}", spread)
    console.print(table)
    ratios = {
        "read_vs_raw": round(medians["redis-py GET"] / medians["ours, verified"], 3),
        "read_vs_lmcache": round(medians["LMCache's connector"] / medians["ours, verified"], 3),
    }
    for name, ratio in ratios.items():
        console.print(f"{name}: {ratio:.2f}× (bar: at least {BARS[name]})")
    return ratios | {"gib": round(gib, 3)} | {f"{name} s": round(s, 3) for name, s in medians.items()}


def fitting(console: Console) -> int:
    """Entries for which there is memory: twice in the server, once in each of two stores, and a sixth to spare."""
    with open("/proc/meminfo", encoding="ascii") as file:
        there = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    size = min(WHOLE, there // 6 // (TOGETHER * ENTRY) * (TOGETHER * ENTRY))
    if size < WHOLE:
        console.print(f"{size // MIB} MiB are read instead of 1 GiB: {there // MIB} MiB of memory are available")
    if not size:
        raise SystemExit("there is not enough memory to measure reading")
    return size // ENTRY


@contextmanager
def server(program: Path, folder: Path) -> Iterator[int]:
    """A redis-server on a free port that keeps nothing on disk."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    process = subprocess.Popen([str(program), *options], stdout=subprocess.DEVNULL)
    try:
        client, until = Redis(port=port), time.monotonic() + 10
        while True:
            try:
                client.ping()
                break
            except RedisError:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{program} did not start") from None
                time.sleep(0.02)
        client.close()
        yield port
    finally:
        process.kill()
        process.wait()


def content(number: int) -> torch.Tensor:
    """``[L, T, C]`` bfloat16, filled with the entry's number as far as that has the digits."""
    shape = (SHAPE.layers, TOKENS, SHAPE.kv_heads * SHAPE.head_dim)
    return torch.full(shape, value(number), dtype=torch.bfloat16)


def value(number: int) -> float:
    return number % 128 + 0.5


def key(number: int) -> bytes:
    return KeySpace(OWNER.model).base(number.to_bytes(4, "little"))


def ours(opened: ExitStack, folder: Path, port: int, count: int) -> Reader:
    file = folder / "ours.yaml"
    memory = (count + 2 * TOGETHER) * (ENTRY + MIB // 64) / 2**30
    prefix = "  remote_storage_plugin.kvcmas."
    file.write_text(
        f"chunk_size: {TOKENS}\nmax_local_cpu_size: {memory}\nremote_storage_plugins: [kvcmas]\nextra_config:\n"
        f"{prefix}url: redis://127.0.0.1:{port}\n{prefix}timeout_ms: 60000\n"
    )
    store = open_store(load_lmcache_config(str(file)), OWNER, SHAPE)
    opened.callback(store.close)
    wanted = [Needed(key(number), EntryKind.BASE) for number in range(count)]
    specs = codecs.specs(codecs.RAW, SHAPE.layers, TOKENS, SHAPE.kv_heads, SHAPE.head_dim, SHAPE.dtype)
    for number in range(count):
        room = store.reserve(
            key(number), EntryKind.BASE, specs, codecs.meta(codecs.RAW, 0, SHAPE.kv_heads, SHAPE.dtype)
        )
        if room is None:
            raise SystemExit("no memory for an entry")
        for tensor in room.tensors.values():
            tensor.copy_(content(number))
        room.commit()
        if number % TOGETHER == TOGETHER - 1:  # the queue holds 256 MiB
            store.flush(60)
    store.flush(60)
    if store.stats().shared["written"] != count:
        raise SystemExit(f"Redis did not take all entries: {store.stats().shared}")

    def read(batch: Sequence[int]) -> None:
        if store.prefetch([wanted[number] for number in batch]) != NotHad():
            raise SystemExit("entries did not come back")

    def forget() -> None:
        for number in range(count):
            store.remove(key(number))
        store.take_evicted()

    forget()
    return Reader("ours, verified", read, forget)


def raw(opened: ExitStack, port: int, count: int) -> Reader:
    """redis-py, one GET after the other, of our entries."""
    client = Redis(port=port)
    opened.callback(client.close)
    names = [Names("kvcmas", OWNER).entry(EntryKind.BASE, key(number)) for number in range(count)]

    def read(batch: Sequence[int]) -> None:
        for number in batch:
            if len(client.get(names[number]) or b"") < ENTRY:  # type: ignore[arg-type]
                raise SystemExit("an entry is not in Redis")

    return Reader("redis-py GET", read, lambda: None)


def lmcaches(folder: Path, port: int, count: int) -> Reader:
    """LMCache's own connector, by its storage manager, with chunks of its own of the same size."""
    file = folder / "lmcache.yaml"
    memory = (count + 2 * TOGETHER) * (ENTRY + MIB // 64) / 2**30
    file.write_text(
        f"chunk_size: {TOKENS}\nmax_local_cpu_size: {memory}\nremote_url: redis://127.0.0.1:{port}\n"
        "remote_serde: naive\nblocking_timeout_secs: 60\n"
    )
    metadata = lm.LMCacheMetadata(
        model_name="bench",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=SHAPE.dtype,
        kv_shape=(SHAPE.layers, 2, TOKENS, SHAPE.kv_heads, SHAPE.head_dim),
        role="worker",
        chunk_size=TOKENS,
    )
    # Its connector waits for itself when it is closed: it goes with the process, as threads do that a daemon starts.
    made: list[Any] = []
    start = threading.Thread(
        target=lambda: made.append(
            lm.StorageManager(lm.LMCacheEngineConfig.from_file(str(file)), metadata, lm.EventManager())
        ),
        daemon=True,
    )
    start.start()
    start.join()
    [manager] = made
    remote, local = manager.storage_backends["RemoteBackend"], manager.storage_backends["LocalCPUBackend"]
    shape = torch.Size([2, SHAPE.layers, TOKENS, SHAPE.kv_heads * SHAPE.head_dim])
    keys = [lm.CacheEngineKey("bench", 1, 0, number, SHAPE.dtype) for number in range(count)]
    for number, name in enumerate(keys):
        obj = manager.allocate(shape, SHAPE.dtype, lm.MemoryFormat.KV_2LTD, eviction=True, busy_loop=False)
        if obj is None:
            raise SystemExit("LMCache has no memory for an entry")
        obj.tensor.copy_(content(number))
        manager.batched_put([name], [obj], location="RemoteBackend")
        while remote.put_tasks:
            time.sleep(0.001)

    def read(batch: Sequence[int]) -> None:
        objs = manager.batched_get([keys[number] for number in batch], location="RemoteBackend")
        for number, obj in zip(batch, objs, strict=True):
            if obj is None or float(obj.tensor[0, 0, 0, 0]) != value(number):
                raise SystemExit("LMCache's connector did not bring an entry back")
            obj.ref_count_down()

    def forget() -> None:
        for name in keys:
            local.remove(name)

    forget()
    return Reader("LMCache's connector", read, forget)


# --- bytes ---


def store_ratios(model: Model) -> dict[str, float]:
    """By codec of the base: bytes of four agents, over four caches at full width."""
    full = chunks(model, codecs.RAW)
    differences = (AGENTS - 1) * difference(model)
    return {
        "" if codec == codecs.RAW else f"_{codec}": round((chunks(model, codec) + differences) / (AGENTS * full), 4)
        for codec in (codecs.RAW, "int8")
    }


def chunks(model: Model, codec: str) -> int:
    """Bytes of a context's base, one entry a chunk."""
    specs = codecs.specs(codec, model.layers, CHUNK, model.heads, model.dim, torch.bfloat16)
    k = torch.randn(model.layers, CHUNK, model.heads * model.dim, generator=torch.Generator().manual_seed(1))
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    codecs.write(codec, k.bfloat16(), k.bfloat16(), model.heads, tensors)
    places = range(0, CONTEXT, CHUNK)
    return sum(
        written(EntryKind.BASE, tensors, codecs.meta(codec, place, model.heads, torch.bfloat16)) for place in places
    )


def difference(model: Model) -> int:
    """Bytes of one agent's difference: one entry for the whole run, factors in the cache's dtype."""
    run = torch.randn(1, CONTEXT, model.heads * model.dim, generator=torch.Generator().manual_seed(2))
    layer = Factors.of(run, RANK, torch.bfloat16)  # every layer's are of this shape
    v = None if layer.v is None else layer.v.repeat(model.layers, 1, 1)
    factors = Factors(layer.u.repeat(model.layers, 1, 1), v)
    meta: Meta = {"source": "solver", "destination": "critic", "slot": 0}
    return written(EntryKind.DELTA, named(factors, factors), meta)


def written(kind: EntryKind, tensors: dict[str, torch.Tensor], meta: Meta) -> int:
    """Bytes of an entry that was really written."""
    size = lay_out(kind, bytes(32), OWNER, {name: TensorSpec.of(t) for name, t in tensors.items()}, meta).size
    return encode_into(torch.empty(size, dtype=torch.uint8), kind, bytes(32), OWNER, tensors, meta)


def show_sizes(ratios: Any, console: Console) -> None:
    table = Table(title=f"{AGENTS} agents on {CONTEXT:,} tokens: bytes in the store ÷ {AGENTS} caches at full width")
    for column in ("L, H, D", "base bf16", "bar", "base int8"):
        table.add_column(column, justify="right")
    for name, model in MODELS.items():
        raw_base, int8_base = ratios[f"agents4_{name}"], ratios[f"agents4_{name}_int8"]
        bar = f"≤ {BARS[f'agents4_{name}']}"
        table.add_row(", ".join(map(str, model)), f"{raw_base:.3f}", bar, f"{int8_base:.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
