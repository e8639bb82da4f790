"""A broken blob that is taken for an entry becomes a wrong cache, and a wrong answer that nobody notices."""

import struct
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmcache_kvcmas.entries import (
    MAX_HEADER,
    EntryKind,
    ForeignEntryError,
    Owner,
    TensorSpec,
    decode,
    encode_into,
    lay_out,
)
from lmcache_kvcmas.entry_header import DTYPES
from lmcache_kvcmas.errors import EntryError

OWNER = Owner("fingerprint", 1, 2)
KEY = bytes(range(32))


def read(buffer: Tensor, **changes: Any) -> Any:
    return decode(buffer, **{"kind": EntryKind.DELTA, "owner": OWNER, "key": KEY, **changes})


def small() -> tuple[Tensor, int]:
    buffer = torch.full((1024,), 0xAA, dtype=torch.uint8)
    tensors = {"u": torch.arange(5, dtype=torch.int16), "v": torch.ones(2, 3, dtype=torch.bfloat16)}
    return buffer, encode_into(buffer, EntryKind.DELTA, KEY, OWNER, tensors, {"rank": 32, "e": 0.5, "agent": "critic"})


def forge(header: Any, payload: bytes = b"", size: int | None = None) -> Tensor:
    """A blob around any header, with sizes and checksums that are right: what only the header's checks can catch."""
    packed = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    begin = -(-(64 + len(packed)) // 64) * 64
    total = begin + len(payload) if size is None else size
    fixed = struct.pack("<8sHHIQQ", b"KVCMASEN", 1, 0, len(packed), total, xxhash.xxh3_64_intdigest(payload))
    head = bytearray(begin)
    head[:32], head[64 : 64 + len(packed)] = fixed, packed
    check = xxhash.xxh3_64_intdigest(bytes(head[:32]) + bytes(head[40:]))
    head[32:40] = check.to_bytes(8, "little")
    return torch.frombuffer(bytearray(bytes(head) + payload), dtype=torch.uint8)


def header(**changes: Any) -> dict[str, Any]:
    row = ["x", "uint8", [4]]
    return {
        "kind": "delta", "key": KEY, "model": OWNER.model, "tp_rank": 1, "tp_size": 2, "created": 1.0,
        "rows": [row], "meta": {}, **changes,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 4), (7,), (2, 3, 5), (1, 1, 1, 1, 1, 1, 1, 3)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A cache whose values change on the way through the store gives other answers than the one that was put in."""
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    buffer = torch.zeros(4096, dtype=torch.uint8)
    encode_into(buffer, EntryKind.DELTA, KEY, OWNER, {"first": torch.ones(3), "x": raw.view(dtype).view(shape)}, {})
    found = read(buffer).tensors["x"]
    assert (found.dtype, tuple(found.shape)) == (dtype, shape)
    assert torch.equal(found.reshape(count).view(torch.uint8), raw)


def test_reading_copies_nothing() -> None:
    """Copying every entry of a hop would add its whole size in memory traffic to the time to the first token."""
    buffer, _ = small()
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
    for tensor in read(buffer).tensors.values():
        assert start < tensor.data_ptr() < end
        assert (tensor.data_ptr() - start) % 64 == 0


def test_the_header_comes_back() -> None:
    """Readers decide by these fields whose cache this is, and how to unpack it."""
    buffer, _ = small()
    found = read(buffer).header
    assert (found.kind, found.key, found.owner) == (EntryKind.DELTA, KEY, OWNER)
    assert found.meta == {"rank": 32, "e": 0.5, "agent": "critic"}


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_no_flipped_byte_goes_unnoticed(mask: int) -> None:
    """One bit that flips on a disk or a wire would otherwise be attended to as if it were a cache."""
    buffer, size = small()
    read(buffer)
    for at in range(size):
        buffer[at] ^= mask
        with pytest.raises(EntryError):
            read(buffer)
        buffer[at] ^= mask
    read(buffer)


def test_no_truncation_goes_unnoticed() -> None:
    """A file cut short by a full disk, or a value by a killed writer, must be a miss."""
    buffer, size = small()
    for length in range(size):
        with pytest.raises(EntryError):
            read(buffer[:length])
        cut = buffer.clone()
        cut[length:] = 0x55
        if not torch.equal(cut[:size], buffer[:size]):
            with pytest.raises(EntryError):
                read(cut)


def test_an_entry_that_was_not_sealed_is_none() -> None:
    """A writer that dies half-way must not leave something behind that reads as an entry."""
    buffer, _ = small()
    layout = lay_out(EntryKind.DELTA, KEY, OWNER, {"x": TensorSpec((4,), torch.float32)}, {})
    layout.views(buffer)["x"].zero_()
    with pytest.raises(EntryError):
        read(buffer)


def test_nothing_of_the_memorys_former_content_gets_out() -> None:
    """Memory is recycled between tenants; what lies between tensors is written to disk with them."""
    buffer, size = small()
    entry = read(buffer)
    seen = torch.zeros(size, dtype=torch.bool)
    for tensor in entry.tensors.values():
        begin = tensor.data_ptr() - buffer.data_ptr()
        seen[begin : begin + tensor.numel() * tensor.element_size()] = True
    assert not torch.any(buffer[64:size][~seen[64:]] == 0xAA)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": EntryKind.BASE},
        {"owner": Owner("other", 1, 2)},
        {"owner": Owner("fingerprint", 0, 2)},
        {"owner": Owner("fingerprint", 1, 4)},
        {"key": bytes(32)},
    ],
    ids=["kind", "model", "rank", "size", "key"],
)
def test_a_whole_entry_of_someone_else_is_refused(changes: dict[str, Any]) -> None:
    """Another model's, or another rank's, cache has the right shape and the wrong meaning."""
    buffer, _ = small()
    with pytest.raises(ForeignEntryError):
        read(buffer, **changes)


@pytest.mark.parametrize(
    "bad",
    [
        header(rows=[["x", "uint8", [2**40]]]),
        header(rows=[["x", "uint8", [2**39] * 8]]),
        header(rows=[["x", "uint8", [2**63]]]),
        header(rows=[["x", "uint8", [-4]]]),
        header(rows=[["x", "uint8", [5]]]),
        header(rows=[["x", "uint8", [1] * 9]]),
        header(rows=[["x", "uint8", 4]]),
        header(rows=[["x", "uint8", [4.0]]]),
        header(rows=[["x", "object", [4]]]),
        header(rows=[["x", "bool", [4]]]),
        header(rows=[["", "uint8", [4]]]),
        header(rows=[["x" * 65, "uint8", [4]]]),
        header(rows=[["x", "uint8", [2]], ["x", "uint8", [2]]]),
        header(rows=[["x", "uint8"]]),
        header(rows=None),
        header(rows=[]),
        header(kind="pickle"),
        header(meta={"deep": {"er": 1}}),
        header(meta={1: 1}),
        header(tp_rank="1"),
        header(unknown=1),
        {},
        [],
        None,
        b"",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 60000,
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_made_of_it(bad: Any) -> None:
    """Bytes from a shared tier may be anyone's: sizes in them must not allocate, overlap, or crash the engine."""
    with pytest.raises(EntryError):
        read(forge(bad, b"abcd"))


def test_the_forged_blob_is_otherwise_right() -> None:
    """Else the test above would pass for another reason than the one it names."""
    assert read(forge(header(), b"abcd")).tensors["x"].tolist() == list(b"abcd")


@pytest.mark.parametrize("size", [0, 63, 64, 255, 1 << 40, (1 << 64) - 1])
def test_a_total_size_that_lies_is_refused(size: int) -> None:
    """As above, for the one size outside of the header."""
    with pytest.raises(EntryError):
        read(forge(header(), b"abcd", size))


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
_HEADERS = st.builds(lambda changes: header(**changes), st.dictionaries(st.sampled_from([*header(), "z"]), _VALUES))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300) | st.builds(msgspec.msgpack.encode, _HEADERS | _VALUES))
def test_whatever_stands_in_a_header_only_one_error_comes_out(packed: bytes) -> None:
    """Another exception would reach the engine's step and end it."""
    # Most drawn headers lie; one that happens to be right must read as what it says.
    try:
        found = read(forge(packed, b"abcd"))
    except EntryError:
        return
    assert found.tensors["x"].tolist() == list(b"abcd")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_at_all_are_no_entry(data: bytes) -> None:
    """As above, for bytes that are not even ours."""
    with pytest.raises(EntryError):
        read(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8))


def test_what_cannot_be_an_entry_is_refused_on_writing() -> None:
    """Found out when reading, it would be lost work; found here, it is a message."""
    with pytest.raises(EntryError, match="complex64"):
        lay_out(EntryKind.BASE, KEY, OWNER, {"x": TensorSpec((1,), torch.complex64)}, {})
    with pytest.raises(EntryError, match="9 dimensions"):
        lay_out(EntryKind.BASE, KEY, OWNER, {"x": TensorSpec((1,) * 9, torch.uint8)}, {})
    with pytest.raises(EntryError, match=str(MAX_HEADER)):
        lay_out(EntryKind.BASE, KEY, OWNER, {}, {"text": "x" * MAX_HEADER})
    with pytest.raises(EntryError, match="too few"):
        lay_out(EntryKind.BASE, KEY, OWNER, {"x": TensorSpec((999,), torch.uint8)}, {}).views(
            torch.zeros(999, dtype=torch.uint8)
        )
