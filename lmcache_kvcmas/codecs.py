"""How a chunk of a base cache is stored: ``raw``, bit for bit, or as 8-bit codes with a scale for each token and head.

::

    raw         k, v [L, T, C] in the cache's dtype        meta position
    int8, fp8   k, v [L, T, C] int8 or float8_e4m3fn,      meta position, codec, heads, dtype (the cache's)
                k.scale, v.scale [L, T, H] fp32

Keys are stored as cached: rotated, row 0 to ``position``. A lossy chunk has a key of its own (`KeySpace.base`), and no
piece that points at one is exact (`layout.lay_out`).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lmcache_kvcmas.entries import Meta, TensorSpec
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.kernels.quantise import FP8, dequantise, quantise_fp8, quantise_int8

RAW = "raw"
CODECS = (RAW, "fp8", "int8")

MAX_POSITION = 1 << 20
"""No chunk ends behind it: what is rotated back needs a table that long."""

_QUANTISE = {"fp8": quantise_fp8, "int8": quantise_int8}
_CODES = {"fp8": FP8, "int8": torch.int8}
_CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in _CACHE_DTYPES.items()}


class Chunk(NamedTuple):
    """Rows of a base chunk: ``k`` (rotated, row 0 to ``position``) and ``v``, ``[L, n, C]`` in the cache's dtype."""

    k: Tensor
    v: Tensor
    position: int


def specs(codec: str, layers: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """The tensors of a BASE entry. ``dtype`` is the cache's: float32, bfloat16 or float16."""
    codes = TensorSpec((layers, tokens, heads * dim), dtype if codec == RAW else _CODES[codec])
    if codec == RAW:
        return {"k": codes, "v": codes}
    scale = TensorSpec((layers, tokens, heads), torch.float32)
    return {"k": codes, "v": codes, "k.scale": scale, "v.scale": scale}


def meta(codec: str, position: int, heads: int, dtype: torch.dtype) -> dict[str, int | float | str]:
    """The meta of a BASE entry whose first row stands at ``position``."""
    if codec == RAW:
        return {"position": position}
    return {"position": position, "codec": codec, "heads": heads, "dtype": _NAMES[dtype]}


def write(codec: str, k: Tensor, v: Tensor, heads: int, into: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `specs` with ``k`` and ``v``, ``[L, T, C]``."""
    for name, x in (("k", k), ("v", v)):
        if codec == RAW:
            into[name].copy_(x)
            continue
        codes, scale = _QUANTISE[codec](_by_head(x, heads))
        into[name].copy_(codes.flatten(2))
        into[f"{name}.scale"].copy_(scale)


def codec_of(meta: Meta) -> object:
    """What the meta of a BASE entry names as its codec; any object, if the entry is not one that `write` made."""
    return meta.get("codec", RAW)


def read(
    tensors: Mapping[str, Tensor], meta: Meta, start: int, end: int, device: torch.device | str = "cpu"
) -> Chunk | None:
    """Rows ``[start, end)`` of a chunk, on ``device``; None if it has no such rows.

    Values are checked where the entry lies, on the CPU: a device never has to be waited for.

    Raises:
        EntryError: the entry is no base chunk, of an unknown codec, or holds what is not finite.
    """
    codec, position = codec_of(meta), meta.get("position")
    k, v = tensors.get("k"), tensors.get("v")
    if k is None or v is None or k.ndim != 3 or not k.numel() or k.shape != v.shape or k.dtype != v.dtype:
        raise EntryError(f"a base chunk has k and v [L, T, C]; got {_shapes(tensors)}")
    tokens, channels = k.shape[1:]
    if not isinstance(position, int) or not 0 <= position <= MAX_POSITION - tokens:
        raise EntryError(f"{tokens} tokens at position {position!r}. Allowed: up to {MAX_POSITION}.")
    if codec == RAW:
        if len(tensors) != 2 or k.dtype not in _NAMES:
            raise EntryError(f"a raw chunk has k and v in {', '.join(_CACHE_DTYPES)}; got {_shapes(tensors)}")
        if not 0 <= start < end <= tokens:
            return None
        k, v = (_checked(x[:, start:end]).to(device) for x in (k, v))
        return Chunk(k, v, position + start)
    heads, dtype = meta.get("heads"), meta.get("dtype")
    if codec not in _CODES or dtype not in _CACHE_DTYPES or not isinstance(heads, int) or heads < 1 or channels % heads:
        raise EntryError(f"{channels} channels of {heads!r} heads, codec {codec!r}, dtype {dtype!r}: no known chunk")
    if {name: TensorSpec.of(t) for name, t in tensors.items()} != specs(
        str(codec), k.shape[0], tokens, heads, channels // heads, _CACHE_DTYPES[dtype]
    ):
        raise EntryError(f"a chunk of {heads} heads and codec {codec} has other tensors than {_shapes(tensors)}")
    if not 0 <= start < end <= tokens:
        return None
    parts = []
    for name in ("k", "v"):
        codes, scale = _checked(tensors[name][:, start:end]), _checked(tensors[f"{name}.scale"][:, start:end])
        if bool((scale < 0).any()):
            raise EntryError("a chunk with a negative scale")
        wide = dequantise(_by_head(codes.to(device), heads), scale.to(device), _CACHE_DTYPES[dtype])
        parts.append(wide.flatten(2))
    return Chunk(parts[0], parts[1], position + start)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """``[L, T, C]`` as ``[L, T, H, D]``."""
    return x.reshape(*x.shape[:2], heads, -1)


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in list(tensors.items())[:8])


def _checked(x: Tensor) -> Tensor:
    """``x``, if all of it is finite; else EntryError."""
    if x.dtype == FP8:
        finite = bool(((x.view(torch.uint8) & 0x7F) != 0x7F).all())
    elif x.dtype == torch.int8:
        finite = True
    else:
        # One pass that keeps nothing; isfinite().all() takes 25 times as long.
        low, high = x.aminmax()
        finite = bool(torch.isfinite(low) & torch.isfinite(high))
    if not finite:
        raise EntryError("a chunk holds values that are not finite")
    return x
