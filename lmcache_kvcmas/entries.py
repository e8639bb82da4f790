"""One entry, one self-describing blob: 64 bytes of fixed fields, a msgpack header, raw tensor bytes.

::

    0   magic "KVCMASEN", u16 format, u16 zero, u32 header length
    16  u64 total length, u64 xxh3 of the payload, u64 xxh3 of everything in front of the payload but this field
    40  24 zero bytes
    64  header (msgpack), zeros up to the next multiple of 64: the payload begins
        tensors in the header's order, each at the next multiple of 64, zeros between them

All numbers are little-endian. Offsets are not stored but follow from the order, so tensors cannot overlap or point out
of the payload. A tensor is written in place (:meth:`EntryLayout.views`), and :meth:`EntryLayout.seal` comes last: until
then the blob has no magic, so a half-written entry is never read as a whole one.
"""

import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from lmcache_kvcmas.entry_header import (
    ALIGN,
    DTYPES,
    NAMES,
    EntryKind,
    ForeignEntryError,
    Header,
    Meta,
    Owner,
    Place,
    Row,
    TensorSpec,
    aligned,
    places_of,
)
from lmcache_kvcmas.errors import EntryError

__all__ = [
    "ALIGN",
    "FORMAT",
    "HEAD_BYTES",
    "MAX_HEADER",
    "Entry",
    "EntryKind",
    "EntryLayout",
    "ForeignEntryError",
    "Header",
    "Meta",
    "Owner",
    "TensorSpec",
    "decode",
    "encode_into",
    "lay_out",
    "read_header",
]

FORMAT = 1
MAX_HEADER = 64 << 10
HEAD_BYTES = 4096
"""First bytes of an entry that hold its header in all but odd cases; those of a record or an anchor take 1 KiB."""

_MAGIC = b"KVCMASEN"
_FIXED = struct.Struct("<8sHHIQQQ24s")
_CHECK = slice(32, 40)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Header)


@dataclass(frozen=True, slots=True)
class Entry:
    """A decoded entry. ``tensors`` are views of the buffer it was decoded from, and live as long as that does."""

    header: Header
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class EntryLayout:
    """Where everything of an entry that is about to be written goes. Made by :func:`lay_out`."""

    header: bytes
    size: int
    """Bytes of the whole blob."""
    payload: int
    """Where the payload begins."""
    places: tuple[Place, ...]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Writable views of ``buffer`` (1-D uint8, at least ``size`` bytes), one a tensor.

        Whatever an earlier entry left in the same memory is made unreadable first.
        """
        _check_buffer(buffer, self.size)
        buffer[: self.payload] = 0
        end = self.payload
        for place in self.places:
            buffer[end : place.start] = 0
            end = place.end
        return {place.name: _view(buffer, place) for place in self.places}

    def seal(self, buffer: Tensor) -> None:
        """Writes header and checksums over a buffer whose tensors are written: from here on it is an entry."""
        _check_buffer(buffer, self.size)
        head = bytearray(self.payload)
        head[_FIXED.size : _FIXED.size + len(self.header)] = self.header
        payload = _payload_checksum(buffer[self.payload : self.size])
        fixed = (_MAGIC, FORMAT, 0, len(self.header), self.size, payload)
        _FIXED.pack_into(head, 0, *fixed, 0, b"")
        _FIXED.pack_into(head, 0, *fixed, _head_checksum(head), b"")
        buffer[: self.payload] = torch.frombuffer(head, dtype=torch.uint8)


def lay_out(kind: EntryKind, key: bytes, owner: Owner, tensors: Mapping[str, TensorSpec], meta: Meta) -> EntryLayout:
    """Plans an entry.

    Raises:
        EntryError: an unknown dtype, too many dimensions, or a header beyond 64 KiB: a mistake in the calling code.
    """
    rows = []
    for name, (shape, dtype) in tensors.items():
        if dtype not in NAMES:
            raise EntryError(f"tensor {name!r} has dtype {dtype}. Allowed: {', '.join(DTYPES)}.")
        rows.append(Row(name, NAMES[dtype], tuple(shape)))
    header = _ENCODER.encode(Header(kind, key, *owner, time.time(), tuple(rows), dict(meta)))
    if len(header) > MAX_HEADER:
        raise EntryError(f"the header takes {len(header)} bytes. Allowed: at most {MAX_HEADER}.")
    payload = aligned(_FIXED.size + len(header))
    places, size = places_of(rows, payload)
    return EntryLayout(header, size, payload, places)


def encode_into(
    buffer: Tensor, kind: EntryKind, key: bytes, owner: Owner, tensors: Mapping[str, Tensor], meta: Meta
) -> int:
    """Writes an entry of finished tensors into ``buffer`` (1-D uint8) and returns its size in bytes.

    Raises:
        EntryError: as :func:`lay_out`, or the buffer is too small.
    """
    layout = lay_out(kind, key, owner, {name: TensorSpec.of(t) for name, t in tensors.items()}, meta)
    for name, view in layout.views(buffer).items():
        view.copy_(tensors[name])
    layout.seal(buffer)
    return layout.size


def decode(buffer: Tensor, *, kind: EntryKind, owner: Owner, key: bytes | None = None) -> Entry:
    """Reads the entry at the start of ``buffer`` (1-D uint8 on the CPU; it may be longer than the entry).

    Every field is checked before it is used and nothing but the header is copied; both checksums are verified.

    Raises:
        EntryError: the bytes are not a whole, undamaged entry of a known format.
        ForeignEntryError: they are, but of another kind, model, rank or key.
    """
    _check_buffer(buffer, _FIXED.size)
    header, payload, size, payload_check = _read_head(lambda n: _bytes(buffer, n), buffer.numel())
    if size > buffer.numel():
        raise EntryError(f"the entry takes {size} bytes, and {buffer.numel()} are there")
    if header.kind is not kind or header.owner != owner or (key is not None and header.key != key):
        # Cut: what the header says may be 64 KiB long, and goes into a log.
        raise ForeignEntryError(
            f"the entry is {header.kind.value} {header.key[:32].hex()} of {str(header.owner)[:200]}, "
            f"not {kind.value} {(key or header.key)[:32].hex()} of {owner}"
        )
    places, end = places_of(header.rows, payload)
    if end != size:
        raise EntryError(f"the entry's tensors end at byte {end}, the entry at {size}")
    if _payload_checksum(buffer[payload:size]) != payload_check:
        raise EntryError("the entry's payload is damaged")
    return Entry(header, {place.name: _view(buffer, place) for place in places})


def read_header(head: bytes) -> Header:
    """The header of the entry whose first bytes are ``head``. The payload, wherever it ends, is not looked at.

    Raises:
        EntryError: these are not the first bytes of an entry of a known format, they are damaged, or too few.
    """
    return _read_head(lambda n: head[:n], len(head)).header


class _Head(NamedTuple):
    header: Header
    payload: int
    size: int
    payload_check: int


def _read_head(first: Callable[[int], bytes], there: int) -> _Head:
    """Everything in front of the payload; ``first(n)`` gives the first ``n`` of ``there`` bytes."""
    if there < _FIXED.size:
        raise EntryError(f"{there} bytes are too few for an entry; at least {_FIXED.size} are needed")
    magic, version, reserved, header_size, size, payload_check, head_check, rest = _FIXED.unpack(first(_FIXED.size))
    if magic != _MAGIC:
        raise EntryError("the bytes do not begin as an entry does")
    if version != FORMAT:
        raise EntryError(f"the entry has format {version}. Known: {FORMAT}.")
    payload = aligned(_FIXED.size + header_size)
    if reserved or any(rest) or header_size > MAX_HEADER or payload > min(size, there):
        raise EntryError(f"the entry's sizes ({header_size}, {size}) do not fit each other, or {there} bytes")
    head = first(payload)
    if _head_checksum(head) != head_check:
        raise EntryError("the entry's header is damaged")
    try:
        header = _DECODER.decode(head[_FIXED.size : _FIXED.size + header_size])
    except msgspec.MsgspecError as error:
        raise EntryError(f"the entry's header is malformed: {error}") from error
    return _Head(header, payload, size, payload_check)


def _view(buffer: Tensor, place: Place) -> Tensor:
    return buffer[place.start : place.end].view(place.dtype).view(place.shape)


def _check_buffer(buffer: Tensor, size: int) -> None:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise EntryError("an entry lies in a contiguous 1-D uint8 tensor on the CPU")
    if buffer.numel() < size:
        raise EntryError(f"{buffer.numel()} bytes are too few for an entry; at least {size} are needed")
    if buffer.storage_offset() % ALIGN:
        raise EntryError(f"an entry begins at a multiple of {ALIGN} bytes, not at {buffer.storage_offset()}")


def _bytes(buffer: Tensor, size: int) -> bytes:
    return buffer[:size].numpy().tobytes()


def _head_checksum(head: bytes | bytearray) -> int:
    hasher = xxhash.xxh3_64(head[: _CHECK.start])
    hasher.update(head[_CHECK.stop :])
    return hasher.intdigest()


def _payload_checksum(payload: Tensor) -> int:
    # xxh3: 10 GB/s on one core; it guards against accidents, the salt in the keys against others.
    return xxhash.xxh3_64_intdigest(payload.numpy().data)
