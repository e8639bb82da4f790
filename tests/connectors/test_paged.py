"""Paged layouts: what can be read back is, bit for bit; what cannot is refused at start-up, not met while serving."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcache_kvcmas.connectors.paged import PagedCache
from lmcache_kvcmas.errors import UnsupportedEngineError

BLOCKS, HEADS, ROWS, DIM, LAYERS = 6, 2, 32, 16, 3
Update = Callable[[Any, Tensor, Tensor, Tensor, Tensor], None]


def fused(_: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """``[B, H, N, 2D]``, as FlashAttention's caches are seen."""
    cache[slots // ROWS, :, slots % ROWS] = torch.cat([k, v], -1)


def transposed_keys(_: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """K as ``[D, N]`` and V as ``[N, D]`` in each head, as CPU kernels have it."""
    heads = cache.view(BLOCKS, HEADS, 2, ROWS * DIM)
    heads[:, :, 0].view(BLOCKS, HEADS, DIM, ROWS)[slots // ROWS, :, :, slots % ROWS] = k
    heads[:, :, 1].view(BLOCKS, HEADS, ROWS, DIM)[slots // ROWS, :, slots % ROWS] = v


def tiled_keys(_: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """K in tiles of 16 tokens, ``[N/16, D, 16]``."""
    heads = cache.view(BLOCKS, HEADS, 2, ROWS * DIM)
    tiles = heads[:, :, 0].view(BLOCKS, HEADS, ROWS // 16, DIM, 16)
    at = slots % ROWS
    tiles[slots // ROWS, :, at // 16, :, at % 16] = k
    heads[:, :, 1].view(BLOCKS, HEADS, ROWS, DIM)[slots // ROWS, :, at] = v


def paired(_: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Channels shuffled: no strides describe it, a table does."""
    order = torch.tensor([(7 * i) % DIM for i in range(DIM)])
    fused(_, k[..., order], v[..., order], cache, slots)


def lossy(_: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Keeps fewer bits than it is given, as a quantised cache does."""
    fused(_, (k * 4).round() / 4, v, cache, slots)


def forgetful(_: Any, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Keeps K only."""
    fused(_, k, torch.zeros_like(v), cache, slots)


def paged(update: Update, dtype: torch.dtype, block: int = ROWS) -> PagedCache:
    caches = {f"layer.{i}": torch.zeros(BLOCKS, HEADS, ROWS, 2 * DIM, dtype=dtype) for i in range(LAYERS)}
    layers = {name: SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update)) for name in caches}
    for layer in layers.values():
        layer.impl.do_kv_cache_update = update
    return PagedCache(caches, layers, block, HEADS, DIM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [ROWS, 2 * ROWS])
@pytest.mark.parametrize("update", [fused, transposed_keys, tiled_keys, paired])
def test_what_is_written_is_read(update: Update, block: int, dtype: torch.dtype) -> None:
    cache = paged(update, dtype, block)
    table = [2, 0, 1] if block == ROWS else [1, 0]
    start, end = 5, 59
    written = torch.randn(2, LAYERS, end - start, HEADS * DIM).to(dtype)
    slots = cache.slots(table, start, end)
    for layer in range(LAYERS):
        cache.write(layer, slots, written[0, layer], written[1, layer])
    k, v = torch.empty_like(written)
    cache.read(table, start, end, k, v)
    assert torch.equal(k, written[0])
    assert torch.equal(v, written[1])


@pytest.mark.parametrize("update", [lossy, forgetful])
def test_what_cannot_be_read_back_is_refused(update: Update) -> None:
    with pytest.raises(UnsupportedEngineError, match=r"cannot be read back|other values than were written"):
        paged(update, torch.float32)


def test_quantised_caches_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"float8_e4m3fn.*kv_cache_dtype=auto"):
        PagedCache({"a": torch.zeros(4, 2, 32, 32, dtype=torch.float8_e4m3fn)}, {"a": None}, 32, 2, 16)


def test_shapes_that_are_not_blocks_of_k_and_v_are_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match="not blocks of K and V for 2 heads of 16"):
        PagedCache({"a": torch.zeros(4, 1000)}, {"a": None}, 32, 2, 16)
