"""Bytes from a shared tier may be anyone's. What gets through here crashes an engine, or becomes a wrong cache."""

import random
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import OpenStore, key
from torch import Tensor

from lmcache_kvcmas import codecs
from lmcache_kvcmas.anchors import Anchor
from lmcache_kvcmas.entries import MAX_HEADER, Entry, EntryKind, ForeignEntryError, Owner, TensorSpec, decode
from lmcache_kvcmas.entry_header import DTYPES, MAX_TENSORS
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.factors import Factors
from lmcache_kvcmas.hot import HotRun, HotTier
from lmcache_kvcmas.sources import fetch
from lmcache_kvcmas.spans import Piece

OWNER = Owner("fingerprint", 1, 2)
KEY = bytes(range(32))
FILES = {path.stem: path.read_bytes() for path in sorted((Path(__file__).parent / "golden").glob("*.bin"))}
KINDS = {name: EntryKind(name.split("-")[0]) for name in FILES}
EACH = pytest.mark.parametrize("name", FILES)

MEMORY = 2 << 20  # bytes that reading a header of 64 KiB may take; measured: 918 KiB at most
SECONDS = 1.0  # and the time; measured: 0.06 s


def tensor_of(data: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def read(data: bytes | bytearray, kind: EntryKind = EntryKind.DELTA) -> Entry:
    return decode(tensor_of(data), kind=kind, owner=OWNER, key=KEY)


def aligned(size: int) -> int:
    return -(-size // 64) * 64


def seal(blob: bytearray) -> None:
    """Make sizes and checksums right for what lies there, as far as there is room: what only other checks can catch."""
    if len(blob) < 64:
        return
    blob[:16] = struct.pack("<8sHHI", b"KVCMASEN", 1, 0, min(struct.unpack_from("<I", blob, 12)[0], len(blob) - 64))
    payload = aligned(64 + struct.unpack_from("<I", blob, 12)[0])
    blob.extend(bytes(max(0, payload - len(blob))))
    blob[16:32] = struct.pack("<QQ", len(blob), xxhash.xxh3_64_intdigest(bytes(blob[payload:])))
    blob[40:64] = bytes(24)
    blob[32:40] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(blob[:32] + blob[40:payload])))


def forge(header: bytes, payload: bytes = b"abcd") -> bytearray:
    blob = bytearray(aligned(64 + len(header)))
    blob[64 : 64 + len(header)] = header
    struct.pack_into("<I", blob, 12, len(header))
    blob += payload
    seal(blob)
    return blob


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "delta", "key": KEY, "model": OWNER.model, "tp_rank": 1, "tp_size": 2, "created": 1.0,
        "rows": [["x", "uint8", [4]]], "meta": {}, **changes,
    }  # fmt: skip


def packed(**changes: Any) -> bytes:
    """A header; a `bytes` in ``changes`` is msgpack as it is to stand there."""
    raw = {f"\0{name}": value for name, value in changes.items() if isinstance(value, bytes)}
    marked = {name.strip("\0"): name for name in raw}
    blob = msgspec.msgpack.encode(fields(**changes | marked))
    for name, value in raw.items():
        blob = blob.replace(msgspec.msgpack.encode(name), value)
    return blob


def refused(blob: bytes | bytearray) -> EntryError:
    """The error that reading raises, within memory and time."""
    buffer = tensor_of(blob)
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(EntryError) as caught:
            decode(buffer, kind=EntryKind.DELTA, owner=OWNER, key=KEY)
        assert time.process_time() - started < SECONDS
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 2000, "it goes into a log"
    return caught.value


# --- damage ---


@EACH
def test_no_flipped_bit_goes_unnoticed(name: str) -> None:
    """One bit that flips on a disk or a wire would otherwise be attended to as if it were a cache."""
    buffer = tensor_of(FILES[name])
    for at in range(len(FILES[name])):
        for bit in range(8):
            buffer[at] ^= 1 << bit
            with pytest.raises(EntryError):
                decode(buffer, kind=KINDS[name], owner=OWNER, key=KEY)
            buffer[at] ^= 1 << bit
    decode(buffer, kind=KINDS[name], owner=OWNER, key=KEY)


@EACH
def test_no_truncation_goes_unnoticed(name: str) -> None:
    """A file cut short by a full disk, or a value by a killed writer, must be a miss; one in recycled memory, too."""
    buffer = tensor_of(FILES[name])
    for length in range(len(FILES[name])):
        cut = buffer.clone()
        cut[length:] = 0x55
        for data in (buffer[:length], cut):
            with pytest.raises(EntryError):
                decode(data, kind=KINDS[name], owner=OWNER, key=KEY)


# --- headers that lie, under checksums that are right ---

_LONG = b"\xdd\xff\xff\xff\xff"  # a list of four billion
HOSTILE: dict[str, bytes] = {
    **{f"{what} of 4 billion": packed(**{what: _LONG}) for what in ("rows", "meta", "key", "model", "kind", "created")},
    **{f"map of 4 billion: {what}": packed(**{what: b"\xdf\xff\xff\xff\xff"}) for what in ("rows", "meta", "model")},
    **{f"text of 4 billion: {what}": packed(**{what: b"\xdb\xff\xff\xff\xff"}) for what in ("kind", "model", "meta")},
    "bytes of 4 billion": packed(key=b"\xc6\xff\xff\xff\xff"),
    "extension of 4 billion": packed(meta=b"\x81\xa1a\xc9\xff\xff\xff\xff\x01"),
    "shape of 4 billion": packed(rows=b"\x91\x93\xa1x\xa5uint8" + _LONG),
    "shape of 16 million that begins": packed(rows=b"\x91\x93\xa1x\xa5uint8\xdd\x01\x00\x00\x00" + b"\x01" * 30_000),
    "rows of 16 million that begin": packed(rows=b"\xdd\x01\x00\x00\x00" + b"\x93\xa1x\xa5uint8\x91\x00" * 5000),
    "meta of 16 million that begins": packed(meta=b"\xdf\x01\x00\x00\x00" + b"\xa1a\x01" * 10_000),
    "deep lists": packed(meta=b"\x81\xa1a" + b"\x91" * 60_000),
    "deep maps": packed(meta=b"\x81\xa1a" * 15_000),
    "deep rows": packed(rows=b"\x91" * 60_000),
    "deep key": packed(key=b"\x91" * 60_000),
    "deep unknown": b"\x81\xa1z" + b"\x91" * 60_000,
    "not UTF-8: model": packed(model=b"\xa2\xff\xfe"),
    "not UTF-8: kind": packed(kind=b"\xa2\xff\xfe"),
    "not UTF-8: name": packed(rows=b"\x91\x93\xa2\xff\xfe\xa5uint8\x91\x04"),
    "not UTF-8: meta": packed(meta=b"\x81\xa2\xff\xfe\x01"),
    "not UTF-8: field": packed().replace(b"\xa4meta", b"\xa4\xff\xff\xff\xff"),
    "surrogates": packed(model=b"\xa3\xed\xa0\x80"),
    "a timestamp": packed(created=b"\xd6\xff\x00\x00\x00\x00"),
    "an unused code": packed(created=b"\xc1"),
    "true for a number": packed(tp_rank=b"\xc3"),
    "none": packed(rows=None),
    "something behind": packed() + b"\xc0",
    "nothing": b"",
    "eight gigabytes": packed(rows=[["x", "float64", [1 << 30]]]),
    "2^64 bytes": packed(rows=[["x", "uint8", [(1 << 64) - 1]]]),
    "a product beyond 2^64": packed(rows=[["x", "uint8", [1 << 39] * 8]]),
    "nothing, of 2^78": packed(rows=[["x", "float32", [1 << 39, 1 << 39, 0]], ["y", "uint8", [4]]]),
    "nothing, of 2^63": packed(rows=[["x", "float32", [0, (1 << 63) - 1]], ["y", "uint8", [4]]]),
    "negative": packed(rows=[["x", "uint8", [-4]]]),
    "negative twice": packed(rows=[["x", "uint8", [-2, -2]]]),
    "a fraction": packed(rows=[["x", "uint8", [4.0]]]),
    "nine dimensions": packed(rows=[["x", "uint8", [1] * 8 + [4]]]),
    "a thousand dimensions": packed(rows=[["x", "uint8", [1] * 1000 + [4]]]),
    "too many tensors": packed(rows=[[f"{i}", "uint8", [0]] for i in range(MAX_TENSORS + 1)]),
    "the same name": packed(rows=[["x", "uint8", [2]], ["x", "uint8", [2]]]),
    "no name": packed(rows=[["", "uint8", [4]]]),
    "a long name": packed(rows=[["x" * 60_000, "uint8", [4]]]),
    "a long dtype": packed(rows=[["x", "y" * 60_000, [4]]]),
    **{f"dtype {d}": packed(rows=[["x", d, [4]]]) for d in ("bool", "complex64", "object", "torch.uint8", "UINT8", "")},
    "no rows": packed(rows=[]),
    "four parts": packed(rows=[["x", "uint8", [4], 0]]),
    "two parts": packed(rows=[["x", "uint8"]]),
    "one byte less": packed(rows=[["x", "uint8", [3]]]),
    "one byte more": packed(rows=[["x", "uint8", [5]]]),
    "a gap": packed(rows=[["x", "uint8", [2]], ["y", "uint8", [2]]]),
    "a list in meta": packed(meta={"a": [1]}),
    "a number for a name in meta": packed(meta={1: 1}),
    "another field": packed(more=1),
    "a long model": packed(model="x" * 60_000),
    "a long key": packed(key=b"\xc5\xea\x60" + b"k" * 60_000),
    "no key": packed(key=b"\xc4\x00"),
    "rank 2^64 - 1": packed(tp_rank=(1 << 64) - 1),
    "rank -1": packed(tp_rank=-1),
    **{f"without {x}": msgspec.msgpack.encode({n: v for n, v in fields().items() if n != x}) for x in fields()},
}  # fmt: skip


@pytest.mark.parametrize("header", HOSTILE.values(), ids=list(HOSTILE))
def test_a_header_that_lies_costs_neither_memory_nor_time_nor_the_engine(header: bytes) -> None:
    """It is refused before anything is made of it, whatever sizes it gives; and what is said of it fits into a log."""
    refused(forge(header))


def test_a_forged_entry_is_otherwise_right() -> None:
    """Else the tests here would pass for another reason than the one that they name."""
    assert read(forge(packed())).tensors["x"].tolist() == list(b"abcd")
    many = packed(rows=[[f"{i}", "uint8", [0]] for i in range(MAX_TENSORS - 1)] + [["x", "uint8", [4]]])
    assert len(read(forge(many)).tensors) == MAX_TENSORS
    for name, data in FILES.items():
        blob = bytearray(data)
        seal(blob)
        assert blob == data, name


def test_a_header_is_at_most_64_kib() -> None:
    header = packed(model="x" * (MAX_HEADER - len(packed(model="")) - 2))
    assert len(header) == MAX_HEADER
    assert isinstance(refused(forge(header)), ForeignEntryError), "read, and of another model"
    assert not isinstance(refused(forge(packed(model="x" * MAX_HEADER))), ForeignEntryError)


@pytest.mark.parametrize("at", range(0, 64, 2))
@pytest.mark.parametrize("value", [1, 0x7FFF, 0x8000, 0xFFFF])
def test_the_fixed_fields_lie_one_by_one(at: int, value: int) -> None:
    """Sizes that wrap around, and fields that no writer of today sets, under a checksum that is right."""
    for data in (FILES["delta"], bytes(forge(packed()))):
        blob = bytearray(data)
        if blob[at : at + 2] == struct.pack("<H", value) or at in (32, 34, 36, 38):
            continue
        blob[at : at + 2] = struct.pack("<H", value)
        end = aligned(64 + struct.unpack_from("<I", data, 12)[0])
        blob[32:40] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(blob[:32] + blob[40:end])))
        refused(blob)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=80)
    | st.binary(max_size=40)
    | st.sampled_from([*DTYPES, "delta", "base", 0, 1, 4, 1 << 40]),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_SIZES = st.integers(-1, 6) | st.sampled_from([1 << 39, 1 << 40, 1 << 62, (1 << 64) - 1])
_NAMES = st.sampled_from(["u", "v", "full", "k", ""])
_ROWS = st.lists(st.tuples(_NAMES, st.sampled_from([*DTYPES, "bool"]), st.lists(_SIZES, max_size=4)), max_size=3)


@settings(max_examples=400, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from([*fields(), "z"]), _VALUES, max_size=3),
    rows=st.none() | _ROWS,
    payload=st.binary(max_size=200),
)
def test_whatever_a_header_says_only_one_error_comes_out(changes: dict[str, Any], rows: Any, payload: bytes) -> None:
    """Another exception would reach the engine's step and end it."""
    given_rows = {} if rows is None else {"rows": rows}
    blob = forge(msgspec.msgpack.encode(fields(**changes | given_rows)), payload)
    try:
        entry = read(blob)
    except EntryError:
        return
    check(entry, tensor_of(blob))


# --- a fuzz loop that knows the format ---


def check(entry: Entry, buffer: Tensor) -> None:
    """What was decoded must be what the header says, inside the payload, and nowhere twice."""
    used: list[tuple[int, int]] = []
    assert len(entry.tensors) == len(entry.header.rows)
    for row in entry.header.rows:
        found = entry.tensors[row.name]
        assert (tuple(found.shape), found.dtype) == (row.shape, DTYPES[row.dtype])
        if found.numel():
            used.append((found.storage_offset() * found.itemsize, found.numel() * found.itemsize))
    end = 64
    for start, size in used:
        assert start >= end
        end = start + size
    assert end <= buffer.numel()


def meaning(entry: Entry) -> Iterator[str]:
    """Every reader on the entry: it raises EntryError, or what it gives can be computed with. Names what was given."""
    readers: tuple[Callable[[], Any], ...] = (
        lambda: codecs.read(entry.tensors, entry.header.meta, 1, 3),
        lambda: Factors.from_tensors({n.removeprefix("k."): t for n, t in entry.tensors.items() if n[:2] == "k."}),
        lambda: Anchor.from_tensors(entry.tensors),
    )
    for reader in readers:
        try:
            found = reader()
        except EntryError:
            continue
        yield type(found).__name__
        if isinstance(found, codecs.Chunk):
            assert found.k.shape == found.v.shape
            assert found.k.shape[1] == 2
            assert torch.isfinite(found.k).all()
            assert torch.isfinite(found.v).all()
            assert 0 <= found.position < codecs.MAX_POSITION
        elif isinstance(found, Factors):
            assert torch.isfinite(found.expand(found.layers - 1)).all()
        elif isinstance(found, Anchor):
            assert torch.isfinite(found.delta_k.expand(0) + found.base_v.expand(0)).all()
            assert found.norm2_k.shape == (found.layers, found.tokens)


NUMBERS = [
    0,
    1,
    2,
    63,
    64,
    65,
    255,
    256,
    0x7FFF,
    0xFFFF,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 64) - 1,
]
CODES = [0x80, 0x81, 0x90, 0x91, 0x9F, 0xA0, 0xA1, 0xBF, *range(0xC0, 0xE0), 0xFF, 0x7F]


def mutants(seed: int, count: int) -> Iterator[tuple[str, bytearray]]:
    """``count`` mutated entries with the name of what they were; about half of them with checksums that are right."""
    draw = random.Random(seed)
    names = list(FILES)
    for number in range(count):
        name = draw.choice(names)
        blob = bytearray(FILES[name])
        header = 64 + struct.unpack_from("<I", blob, 12)[0]
        payload = aligned(header)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            match draw.randrange(9):
                case 0:  # a bit anywhere
                    blob[draw.randrange(len(blob))] ^= 1 << draw.randrange(8)
                case 1:  # a code of msgpack's in the header
                    blob[draw.randrange(64, min(header, len(blob)))] = draw.choice(CODES)
                case 2:  # a number of the header, or one in the fixed fields
                    size = draw.choice((2, 4, 8))
                    at = draw.choice((8, 10, 12, 16, draw.randrange(64, min(header, len(blob) - 8))))
                    value = draw.choice(NUMBERS) % (1 << 8 * size)
                    blob[at : at + size] = value.to_bytes(size, draw.choice(("little", "big")))
                case 3:  # bytes that are too many
                    at = draw.randrange(64, len(blob))
                    blob[at:at] = draw.randbytes(draw.randrange(1, 9))
                case 4:  # or too few
                    at = draw.randrange(64, len(blob))
                    del blob[at : at + draw.randrange(1, 65)]
                case 5:  # an end that comes early, or late
                    size = draw.randrange(64, len(blob) + 64)
                    blob = blob[:size] + bytes(max(0, size - len(blob)))
                case 6:  # a piece of another entry
                    other = FILES[draw.choice(names)]
                    at, size = draw.randrange(len(blob)), draw.randrange(1, 200)
                    blob[at : at + size] = other[at : at + size]
                case 7:  # a field of the header
                    end = 64 + struct.unpack_from("<I", FILES[name], 12)[0]
                    fresh = msgspec.msgpack.decode(FILES[name][64:end])
                    _change(fresh, draw)
                    blob = forge(msgspec.msgpack.encode(fresh), bytes(blob[payload:]))
                    header = 64 + struct.unpack_from("<I", blob, 12)[0]
                    payload = aligned(header)
                case 8:  # numbers of a tensor
                    at = draw.randrange(min(payload, len(blob) - 2), len(blob) - 1)
                    blob[at : at + 2] = draw.choice((b"\xff\xff", b"\x80\x7f", b"\xc0\x7f", b"\x00\x80"))
            if len(blob) < 80:
                blob += bytes(80 - len(blob))
            header, payload = min(header, len(blob) - 1), min(payload, len(blob) - 2)
        if number % 2:
            seal(blob)
        yield name, blob


def _change(header: dict[str, Any], draw: random.Random) -> None:
    values = [None, -1, 0, 2**40, 2**64 - 1, float("nan"), "", "x" * 300, b"", [], [[]], {}, True, *DTYPES]
    match draw.randrange(5):
        case 0:
            header[draw.choice([*header, "z"])] = draw.choice(values)
        case 1:
            row = draw.choice(header["rows"])
            row[draw.randrange(3)] = draw.choice([*values, [2, 3, 8], [0, 3, 8], [2, 3]])
        case 2:
            shape = draw.choice(header["rows"])[2]
            shape[draw.randrange(len(shape))] = draw.choice((-1, 0, 1, 2, 3, 8, 2**39, 2**62))
        case 3:
            header["rows"].append(draw.choice(header["rows"]))
            draw.shuffle(header["rows"])
        case 4:
            header["meta"][draw.choice([*header["meta"], "position", "codec"])] = draw.choice(
                [*values, "int8", "raw", 7]
            )


def test_a_hundred_thousand_mutants() -> None:
    """None may raise but EntryError; what is read must be what it says, and nothing that cannot be computed with."""
    seen: Counter[str] = Counter()
    started = time.process_time()
    for name, blob in mutants(20260, 100_000):
        buffer = torch.frombuffer(blob, dtype=torch.uint8)
        try:
            entry = decode(buffer, kind=KINDS[name], owner=OWNER)
        except ForeignEntryError:
            seen["foreign"] += 1
        except EntryError:
            seen["refused"] += 1
        else:
            seen["whole"] += 1
            check(entry, buffer)
            seen.update(meaning(entry))
    # Else the loop would have tested the checksums and nothing else. About half of what was measured.
    least = {"refused": 40_000, "whole": 7000, "foreign": 200, "Chunk": 3000, "Factors": 1200, "Anchor": 1000}
    assert not {name: seen[name] for name, count in least.items() if seen[name] < count}, seen
    assert time.process_time() - started < 60, "a check that needs minutes is one that nobody runs"


# --- whole entries that mean nothing ---


def factors(dtype: torch.dtype = torch.bfloat16, layers: int = 2, tokens: int = 6, rank: int = 3, c: int = 8) -> Any:
    g = torch.Generator().manual_seed(0)
    shapes = {"u": (layers, tokens, rank), "v": (layers, rank, c)}
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


def filled(tensors: dict[str, Tensor], name: str, value: float) -> dict[str, Tensor]:
    return tensors | {name: torch.full_like(tensors[name], value)}


NO_FACTORS: dict[str, dict[str, Tensor]] = {
    "nothing": {},
    "only u": {"u": factors()["u"]},
    "another name": factors() | {"w": torch.ones(1)},
    "full and factors": factors() | {"full": torch.ones(2, 6, 8)},
    "whole numbers": factors(torch.int32),
    "bytes": factors(torch.uint8),
    "fp8": factors(torch.float8_e4m3fn),
    "fp64": factors(torch.float64),
    "two dtypes": factors() | {"v": factors(torch.float32)["v"]},
    "two ranks": factors() | {"v": factors(rank=4)["v"]},
    "other layers": factors() | {"v": factors(layers=3)["v"]},
    "rank 0": factors(rank=0),
    "no layers": factors(layers=0),
    "no tokens": factors(tokens=0),
    "no channels": factors(c=0),
    "two dimensions": {name: t[0] for name, t in factors().items()},
    "four dimensions": {name: t[None] for name, t in factors().items()},
    "full, flat": {"full": torch.ones(2, 48)},
    "full, of whole numbers": {"full": torch.ones(2, 6, 8, dtype=torch.int16)},
    "full NaN": {"full": torch.full((2, 6, 8), float("nan"))},
    "NaN in u": filled(factors(), "u", float("nan")),
    "NaN in v": filled(factors(), "v", float("nan")),
    "infinite": filled(factors(), "u", float("-inf")),
    "a product beyond fp32": filled(filled(factors(), "u", 1e38), "v", -10.0),
    "a sum beyond fp32": filled(filled(factors(), "u", 1e38), "v", 1.0),
}


@pytest.fixture
def store(open_small: OpenStore) -> Any:
    return open_small()


def keep(store: Any, at: bytes, kind: EntryKind, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    room = store.reserve(at, kind, {name: TensorSpec.of(t) for name, t in tensors.items()}, meta)
    for name, t in tensors.items():
        room.tensors[name].copy_(t)
    assert room.commit()


def fetched(store: Any, hot: HotTier | None = None, start: int = 0, end: int = 6, **more: Any) -> Any:
    piece = Piece(start, end, key(1), start, exact=False, **{"delta": key(2), "delta_row": start, **more})
    with ExitStack() as leases:
        source = fetch(store, hot or HotTier(0), piece, torch.device("cpu"), leases)
        return source and (source.tokens, source.delta_k is not None)


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("bad", NO_FACTORS.values(), ids=list(NO_FACTORS))
def test_a_delta_that_is_none_is_a_miss(store: Any, part: str, bad: dict[str, Tensor]) -> None:
    """Added to a cache, it would end a step with an exception, or make NaN of an answer. A miss once, not for ever."""
    with pytest.raises(EntryError):
        Factors.from_tensors(bad)
    keep(store, key(1), EntryKind.BASE, {"k": torch.ones(2, 6, 8), "v": torch.ones(2, 6, 8)}, {"position": 0})
    both: dict[str, dict[str, Tensor]] = {"k": factors(), "v": factors()} | {part: bad}
    keep(store, key(2), EntryKind.DELTA, {f"{p}.{n}": t for p, x in both.items() for n, t in x.items()}, {})
    assert fetched(store) is None
    assert not store.contains(key(2))
    assert store.contains(key(1))


def test_a_delta_of_other_sizes_than_its_root_is_a_miss(store: Any) -> None:
    """It is another's; a slice of it that is silently shorter would be, too."""
    keep(store, key(1), EntryKind.BASE, {"k": torch.ones(2, 6, 8), "v": torch.ones(2, 6, 8)}, {"position": 0})
    sizes: list[dict[str, int]] = [{}, {"layers": 1}, {"layers": 3}, {"c": 16}, {"c": 4}, {"tokens": 5}]
    for n, size in enumerate(sizes, 2):
        tensors = {f"{p}.{name}": t for p in "kv" for name, t in factors(**size).items()}
        keep(store, key(n), EntryKind.DELTA, tensors, {})
        assert (fetched(store, delta=key(n)) is None) == bool(size)
    assert fetched(store) == (6, True)
    assert fetched(store, start=2, end=5) == (3, True)
    for row in (-1, -6, 1, 6, 2**62):
        assert fetched(store, delta_row=row) is None


def test_rows_that_a_hot_run_does_not_have_are_not_taken_from_it(store: Any) -> None:
    """A record that another node wrote says which rows; the run in memory may be another one's, or shorter."""
    keep(store, key(1), EntryKind.BASE, {"k": torch.ones(2, 6, 8), "v": torch.ones(2, 6, 8)}, {"position": 0})
    hot = HotTier(1 << 20)
    hot.put(key(2), HotRun(torch.ones(2, 4, 8), torch.ones(2, 4, 8), 0))
    assert fetched(store, hot, end=4) == (4, False)
    assert fetched(store, hot, end=5) is None
    assert fetched(store, hot, delta_row=-2, end=4) is None


def anchor(**changes: Tensor | None) -> dict[str, Tensor]:
    made = {f"{part}.{n}": t for part in ("delta_k", "delta_v", "base_k", "base_v") for n, t in factors().items()}
    made |= {"offsets": torch.arange(6, dtype=torch.int32), "norm2_k": torch.ones(2, 6), "norm2_v": torch.ones(2, 6)}
    return {name: t for name, t in (made | changes).items() if t is not None}


NO_ANCHORS: dict[str, dict[str, Tensor]] = {
    "no offsets": anchor(offsets=None),
    "no base": anchor(**{"base_k.u": None, "base_k.v": None}),
    "another part": anchor(**{"base_q.u": torch.ones(2, 6, 3)}),
    "offsets of 64 bits": anchor(offsets=torch.arange(6)),
    "offsets with a hole": anchor(offsets=torch.arange(5, dtype=torch.int32)),
    "offsets that fall": anchor(offsets=torch.arange(6, dtype=torch.int32).flip(0)),
    "offsets twice": anchor(offsets=torch.zeros(6, dtype=torch.int32)),
    "negative offsets": anchor(offsets=torch.arange(-1, 5, dtype=torch.int32)),
    "offsets of two dimensions": anchor(offsets=torch.arange(6, dtype=torch.int32)[None]),
    "norms of 16 bits": anchor(norm2_k=torch.ones(2, 6, dtype=torch.bfloat16)),
    "norms of whole numbers": anchor(norm2_k=torch.ones(2, 6, dtype=torch.int32)),
    "norms of other layers": anchor(norm2_v=torch.ones(3, 6)),
    "NaN norms": anchor(norm2_v=torch.full((2, 6), float("nan"))),
    "infinite norms": anchor(norm2_k=torch.full((2, 6), float("inf"))),
    "negative norms": anchor(norm2_k=torch.full((2, 6), -1.0)),
    "NaN in a base": anchor(**{"base_v.u": torch.full((2, 6, 3), float("nan"), dtype=torch.bfloat16)}),
    "other tokens": anchor(**{"base_v.u": torch.ones(2, 5, 3, dtype=torch.bfloat16)}),
    "other channels": anchor(**{"base_v.v": torch.ones(2, 3, 9, dtype=torch.bfloat16)}),
    "no tokens": {name: t[:, :0] if ".u" in name or "norm" in name else t[:0] for name, t in anchor().items()},
}


@pytest.mark.parametrize("bad", NO_ANCHORS.values(), ids=list(NO_ANCHORS))
def test_an_anchor_that_is_none_is_refused(bad: dict[str, Tensor]) -> None:
    """A pool with it would make every prediction of its edge NaN, and the gate's ê with it."""
    Anchor.from_tensors(anchor())
    with pytest.raises(EntryError):
        Anchor.from_tensors(bad)
