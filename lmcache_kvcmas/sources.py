"""Pieces turned into tensors: where a stretch of a prompt finds the cache that it is made from."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from lmcache_kvcmas import codecs
from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.factors import Factors
from lmcache_kvcmas.hot import HotTier
from lmcache_kvcmas.kernels.correct import release
from lmcache_kvcmas.kernels.rope import RopeTable
from lmcache_kvcmas.model import ModelGeometry
from lmcache_kvcmas.spans import Piece
from lmcache_kvcmas.store import EntryStore


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The cache of a piece: ``k`` (as cached, row 0 rotated to ``position``) and ``v``, ``[L, T, C]``, and its delta.

    The tensors are views of what holds them: valid as long as the leases that `fetch` was given are open.
    """

    k: Tensor
    v: Tensor
    position: int
    delta_k: Factors | None = None
    delta_v: Factors | None = None

    @property
    def tokens(self) -> int:
        return self.k.shape[1]

    def free(self, rope: RopeTable, layer: int) -> tuple[Tensor, Tensor]:
        """Position-free keys and values of one layer, its delta added, fp32 ``[T, C]``."""
        cos, sin = rope.span(self.position, self.position + self.tokens)
        k, v = release(rope, self.k[layer], cos, sin), self.v[layer].float()
        if self.delta_k is not None and self.delta_v is not None:
            k, v = k + self.delta_k.expand(layer), v + self.delta_v.expand(layer)
        return k, v


def fetch(
    store: EntryStore,
    hot: HotTier,
    piece: Piece,
    device: torch.device,
    leases: ExitStack,
    geometry: ModelGeometry | None = None,
) -> Source | None:
    """The source of ``piece``, or None if any part of it is missing, or not what a cache of ``geometry`` looks like.

    Open leases go to ``leases``. An entry that is whole but cannot be used is removed: it would be a miss for ever.
    """
    end = piece.delta_row + piece.end - piece.start
    if piece.delta is not None:
        run = hot.get(piece.delta)
        if run is not None and piece.delta_row >= 0 and end <= run.k.shape[1]:
            rows = slice(piece.delta_row, end)
            return Source(run.k[:, rows], run.v[:, rows], run.position + piece.delta_row)
    root = fetch_root(store, piece, device, leases, geometry)
    if root is None or piece.delta is None:
        return root
    lease = store.get(piece.delta, EntryKind.DELTA)
    if lease is None:
        return None
    leases.enter_context(lease)
    try:
        delta_k, delta_v = (
            Factors.from_tensors({n.removeprefix(x): t for n, t in lease.tensors.items() if n.startswith(x)})
            for x in ("k.", "v.")
        )
    except EntryError:
        store.remove(piece.delta)
        return None
    shape = (root.k.shape[0], root.k.shape[2])
    if any((f.layers, f.channels) != shape or f.tokens < end for f in (delta_k, delta_v)) or piece.delta_row < 0:
        return None
    parts = [f.rows(piece.delta_row, end).to(device) for f in (delta_k, delta_v)]
    return Source(root.k, root.v, root.position, parts[0], parts[1])


def fetch_all(
    store: EntryStore,
    hot: HotTier,
    pieces: Sequence[Piece],
    device: torch.device,
    leases: ExitStack,
    geometry: ModelGeometry | None = None,
) -> list[Source] | Piece:
    """A source for each piece, or the first piece that has none, or one of another form than the first."""
    found: list[Source] = []
    for piece in pieces:
        source = fetch(store, hot, piece, device, leases, geometry)
        if source is None or (found and _form(source) != _form(found[0])):
            return piece
        found.append(source)
    return found


def _form(source: Source) -> tuple[int, int, torch.dtype]:
    return source.k.shape[0], source.k.shape[2], source.k.dtype


def fetch_root(
    store: EntryStore, piece: Piece, device: torch.device, leases: ExitStack, geometry: ModelGeometry | None = None
) -> Source | None:
    """The full-width rows under ``piece``, without its delta. An exact piece has no use for a lossy chunk."""
    lease = store.get(piece.chunk, EntryKind.BASE)
    if lease is None:
        return None
    leases.enter_context(lease)
    if piece.exact and codecs.codec_of(lease.meta) != codecs.RAW:
        return None
    try:
        chunk = codecs.read(lease.tensors, lease.meta, piece.row, piece.row + piece.end - piece.start, device)
    except EntryError:
        store.remove(piece.chunk)
        return None
    source = None if chunk is None else Source(*chunk)
    if source is None or geometry is None:
        return source
    return source if _form(source) == (geometry.layers, geometry.channels, geometry.torch_dtype) else None
