"""The header of an entry from its first bytes."""

import pytest
import torch

from lmcache_kvcmas.entries import HEAD_BYTES, EntryKind, Owner, decode, encode_into, read_header
from lmcache_kvcmas.errors import EntryError


@pytest.fixture
def blob() -> bytes:
    buffer = torch.empty(1 << 16, dtype=torch.uint8)
    size = encode_into(
        buffer, EntryKind.ANCHOR, b"k" * 32, Owner("m", 1, 2), {"x": torch.ones(5000)}, {"source": "a", "slot": 0}
    )
    return buffer[:size].numpy().tobytes()


def test_it_is_the_header_that_decode_gives(blob: bytes) -> None:
    whole = decode(torch.frombuffer(bytearray(blob), dtype=torch.uint8), kind=EntryKind.ANCHOR, owner=Owner("m", 1, 2))
    assert read_header(blob[:HEAD_BYTES]) == read_header(blob) == whole.header
    assert len(blob) > HEAD_BYTES


@pytest.mark.parametrize("at", [0, 8, 12, 20, 33, 70, 90])
def test_no_damaged_head_is_believed(blob: bytes, at: int) -> None:
    damaged = blob[:at] + bytes([blob[at] ^ 0x41]) + blob[at + 1 :]
    with pytest.raises(EntryError):
        read_header(damaged)


@pytest.mark.parametrize("length", [0, 8, 63, 64, 100])
def test_too_few_bytes_are_said(blob: bytes, length: int) -> None:
    with pytest.raises(EntryError):
        read_header(blob[:length])
