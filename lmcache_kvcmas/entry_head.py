"""What an entry says about itself, from its first bytes alone: for tools that look at many and read few."""

import msgspec

from lmcache_kvcmas.entries import _DECODER, _FIXED, _MAGIC, FORMAT, MAX_HEADER, Header, _head_checksum
from lmcache_kvcmas.entry_header import aligned
from lmcache_kvcmas.errors import EntryError

HEAD_BYTES = 4096
"""First bytes of an entry that hold its header in all but odd cases; those of a record or an anchor take 1 KiB."""


def read_header(head: bytes) -> Header:
    """The header of the entry whose first bytes are ``head``. The payload, wherever it ends, is not looked at.

    Raises:
        EntryError: these are not the first bytes of an entry of a known format, they are damaged, or too few.
    """
    if len(head) < _FIXED.size:
        raise EntryError(f"{len(head)} bytes are too few for an entry; at least {_FIXED.size} are needed")
    magic, version, reserved, header_size, size, _, head_check, rest = _FIXED.unpack_from(head)
    if magic != _MAGIC:
        raise EntryError("the bytes do not begin as an entry does")
    if version != FORMAT:
        raise EntryError(f"the entry has format {version}. Known: {FORMAT}.")
    payload = aligned(_FIXED.size + header_size)
    if reserved or any(rest) or header_size > MAX_HEADER or payload > size:
        raise EntryError(f"the entry's sizes ({header_size}, {size}) contradict each other")
    if len(head) < payload:
        raise EntryError(f"{len(head)} bytes are too few for the entry's header; {payload} are needed")
    if _head_checksum(head[:payload]) != head_check:
        raise EntryError("the entry's header is damaged")
    try:
        return _DECODER.decode(head[_FIXED.size : _FIXED.size + header_size])
    except msgspec.MsgspecError as error:
        raise EntryError(f"the entry's header is malformed: {error}") from error
