"""vLLM's paged KV cache as rows of tokens.

Writing goes through the attention layer's own update op, so it is right for every backend. There is no inverse op:
reading goes through a map from (token, head, channel) to the element of a block, measured at start-up by writing known
values. A cache whose map is not one-to-one, or that gives back other values than were written, is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmcache_kvcmas.errors import UnsupportedEngineError

_DIGIT = 128  # exact in bf16, fp16 and fp32


class PagedCache:
    """The caches of all layers of one worker, in model order.

    Args:
        caches: layer name → cache tensor, ``[blocks, ...]``, as vLLM registers them.
        layers: layer name → attention layer, whose ``impl.do_kv_cache_update`` writes.
        block: tokens of a block of the scheduler's cache manager; the caches may have smaller ones.
        heads, dim: KV heads of this rank and their dimension.

    Raises:
        UnsupportedEngineError: the layout is not one that can be read back.
    """

    def __init__(
        self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], block: int, heads: int, dim: int
    ) -> None:
        self._caches = list(caches.values())
        self._layers = [layers[name] for name in caches]
        self.block, self._heads, self._dim = block, heads, dim
        first = self._caches[0]
        if any(c.shape != first.shape or c.dtype != first.dtype for c in self._caches):
            raise UnsupportedEngineError("the layers' caches differ in shape or dtype")
        if first.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedEngineError(f"a KV cache of {first.dtype} holds no plain values (use kv_cache_dtype=auto)")
        self.dtype, self.device = first.dtype, first.device
        per_block, rest = divmod(first[0].numel(), 2 * heads * dim)
        if rest or per_block == 0 or block % per_block:
            raise UnsupportedEngineError(
                f"a cache of shape {tuple(first.shape)} is not blocks of K and V for {heads} heads of {dim}"
            )
        self._rows = per_block
        self._view = self._measure()
        self._prove()

    @property
    def layers(self) -> int:
        return len(self._caches)

    @property
    def channels(self) -> int:
        """Of one rank: KV heads × head dim."""
        return self._heads * self._dim

    @property
    def blocks(self) -> int:
        """Blocks of the scheduler's cache manager."""
        return self._caches[0].shape[0] * self._rows // self.block

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks of all layers."""
        per_block = self.block // self._rows
        for block in block_ids:
            for cache in self._caches:
                cache[block * per_block : (block + 1) * per_block].zero_()

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Cache slots of positions ``[start, end)``, int64 on the device."""
        positions = torch.arange(start, end)
        blocks = torch.as_tensor(block_ids, dtype=torch.int64)[positions // self.block]
        return (blocks * self.block + positions % self.block).to(self.device)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store ``k`` and ``v``, each ``[T, C]`` in the cache's dtype, at ``slots`` of one layer."""
        shape = (-1, self._heads, self._dim)
        attention = self._layers[layer]
        attention.impl.do_kv_cache_update(attention, k.view(shape), v.view(shape), self._caches[layer], slots)

    def read(self, block_ids: Sequence[int], start: int, end: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy positions ``[start, end)`` of all layers into ``k`` and ``v``, each ``[L, end - start, C]``."""
        first, last = start // self.block, (end - 1) // self.block + 1
        per_block = self.block // self._rows
        blocks = torch.as_tensor(block_ids[first:last], dtype=torch.int64)
        blocks = (blocks[:, None] * per_block + torch.arange(per_block)).flatten().to(self.device)
        skip = start - first * self.block
        for layer, cache in enumerate(self._caches):
            rows = self._unpack(cache[blocks])
            for to, rows_of in zip((k, v), rows, strict=True):
                to[layer].copy_(rows_of[skip : skip + end - start])

    def _unpack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[blocks, ...]`` as stored → K and V, ``[tokens, C]`` each."""
        count = len(blocks)
        flat = blocks.reshape(count, -1)
        if isinstance(self._view, torch.Tensor):
            both = flat[:, self._view.flatten()].view(count, 2, self._rows, self._heads * self._dim)
        else:
            strides, offset = self._view
            shape = (count, 2, self._rows // strides[1], strides[1], self._heads, self._dim)
            both = flat.as_strided(shape, (flat.stride(0), *strides[0]), flat.storage_offset() + offset)
            both = both.reshape(count, 2, self._rows, self._heads * self._dim)
        return both[:, 0].reshape(count * self._rows, -1), both[:, 1].reshape(count * self._rows, -1)

    def _measure(self) -> Any:
        """Element of a flat block that holds (K or V, token, head, channel): strides where there are any, else a table.

        Writes the digits of each element's own number, and reads off where they went.
        """
        rows, heads, dim = self._rows, self._heads, self._dim
        half = rows * heads * dim
        number = torch.arange(2 * half).view(2, rows, heads * dim)
        found = torch.zeros(2 * half, dtype=torch.int64)
        scale = 1
        while scale < 2 * half:
            digit = (number // scale % _DIGIT).to(self.dtype)
            found += self._scratch(digit[0], digit[1]).round().long() * scale
            scale *= _DIGIT
        table = torch.empty(2 * half, dtype=torch.int64)
        if not torch.equal(found.sort().values, torch.arange(2 * half)):
            raise UnsupportedEngineError(
                f"the {type(self._layers[0].impl).__name__} backend stores K and V in a layout that cannot be read back"
            )
        table[found] = torch.arange(2 * half)
        table = table.view(2, rows, heads, dim)
        return _as_strides(table) or table.view(2, rows, heads * dim).to(self.device)

    def _scratch(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write one block's K and V into an unused block of the first layer; its elements as they lie, fp32 on CPU."""
        cache = self._caches[0]
        block = cache.shape[0] - 1
        slots = torch.arange(block * self._rows, (block + 1) * self._rows, device=self.device)
        self.write(0, slots, k.to(self.device), v.to(self.device))
        stored = cache[block].reshape(-1).float().cpu().clone()
        cache[block].zero_()
        return stored

    def _prove(self) -> None:
        """Random values written through the engine must come back from `read`, bit for bit, and not all at once."""
        cache = self._caches[0]
        generator = torch.Generator().manual_seed(0)
        shape = (2, self._rows, self._heads * self._dim)
        k, v = torch.randn(shape, generator=generator).to(self.dtype).to(self.device)
        block = cache.shape[0] - 1
        picked = torch.arange(1, self._rows - 1)
        self.write(0, (block * self._rows + picked).to(self.device), k[picked].contiguous(), v[picked].contiguous())
        got_k, got_v = self._unpack(cache[block : block + 1])
        cache[block].zero_()
        if not (torch.equal(got_k[picked], k[picked]) and torch.equal(got_v[picked], v[picked])):
            raise UnsupportedEngineError("the paged cache gave back other values than were written")


def _as_strides(table: torch.Tensor) -> tuple[tuple[tuple[int, ...], int], int] | None:
    """``table [2, N, H, D]`` as strides over (K or V, tile, row of tile, head, channel), or None.

    Backends keep the rows of a block evenly spaced or in tiles; strides make a read one copy instead of a gather.
    """
    offset = int(table[0, 0, 0, 0])
    rows = table.shape[1]

    def step(axis: int, by: int = 1) -> int:
        index = [0, 0, 0, 0]
        if table.shape[axis] <= by:
            return 0
        index[axis] = by
        return int(table[tuple(index)]) - offset

    for tile in (t for t in (rows, 64, 32, 16, 8) if t <= rows and rows % t == 0):
        strides = (step(0), step(1, tile), step(1), step(2), step(3))
        shape = (2, rows // tile, tile, *table.shape[2:])
        guess = torch.full((1,) * 5, offset)
        for axis, (n, stride) in enumerate(zip(shape, strides, strict=True)):
            guess = guess + torch.arange(n).view([-1 if a == axis else 1 for a in range(5)]) * stride
        if torch.equal(guess.view(table.shape), table):
            return (strides, tile), offset
    return None
