"""What an entry says about itself, and where its tensors lie: everything but the bytes. See ``entries``."""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from lmcache_kvcmas.errors import EntryError

ALIGN = 64
MAX_DIMS = 8
MAX_NAME = 64
MAX_TENSORS = 256
MAX_ELEMENTS = 1 << 40

Meta = Mapping[str, int | float | str]

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class EntryKind(Enum):
    BASE = "base"
    """A chunk of a base cache, full width."""
    DELTA = "delta"
    """A run's own delta on an edge, as factors."""
    ANCHOR = "anchor"
    POOL = "pool"
    """The list of an edge's anchors."""
    RECORD = "record"
    """What one request left behind: its tokens and where their caches lie."""


class ForeignEntryError(EntryError):
    """A whole, well-formed entry, but of another model, rank, kind or key than asked for."""


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype)


class Owner(NamedTuple):
    """Whose entries these are. What a tensor-parallel rank stores is of use to the same rank of the same size only."""

    model: str
    """Fingerprint of the model revision, its tokenizer and RoPE."""
    tp_rank: int = 0
    tp_size: int = 1


class Row(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an entry says about itself."""

    kind: EntryKind
    key: bytes
    model: str
    tp_rank: int
    tp_size: int
    created: float
    """Seconds since 1970, by the writer's clock."""
    rows: tuple[Row, ...]
    meta: dict[str, int | float | str]

    @property
    def owner(self) -> Owner:
        return Owner(self.model, self.tp_rank, self.tp_size)


class Place(NamedTuple):
    """A tensor's bytes ``[start, end)`` in the blob."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def aligned(size: int) -> int:
    """The next multiple of 64."""
    return -(-size // ALIGN) * ALIGN


def places_of(rows: Sequence[Row], payload: int) -> tuple[tuple[Place, ...], int]:
    """Where each tensor lies and where the last one ends. Python's integers: no shape overflows them.

    Raises:
        EntryError: a name, a dtype or a shape that no entry has.
    """
    if len(rows) > MAX_TENSORS:
        raise EntryError(f"the entry has {len(rows)} tensors. Allowed: at most {MAX_TENSORS}.")
    places: list[Place] = []
    seen: set[str] = set()
    end = payload
    for name, dtype, shape in ((row.name, row.dtype, row.shape) for row in rows):
        if not 0 < len(name) <= MAX_NAME or name in seen:
            raise EntryError(f"tensor name {name[:MAX_NAME]!r} is empty, too long, or there twice")
        if dtype not in DTYPES:
            raise EntryError(f"tensor {name!r} has dtype {dtype[:MAX_NAME]!r}. Known: {', '.join(DTYPES)}.")
        # Also of an empty tensor: torch multiplies all its dimensions, in 64 bits.
        if len(shape) > MAX_DIMS or min(shape, default=0) < 0 or math.prod(n or 1 for n in shape) > MAX_ELEMENTS:
            raise EntryError(f"tensor {name!r} has an impossible shape of {len(shape)} dimensions")
        seen.add(name)
        start = aligned(end)
        end = start + math.prod(shape) * DTYPES[dtype].itemsize
        places.append(Place(name, DTYPES[dtype], shape, start, end))
    return tuple(places), end
