"""Pieces turned into tensors: where a stretch of a prompt finds the cache that it is made from."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.factors import Factors
from lmcache_kvcmas.hot import HotTier
from lmcache_kvcmas.kernels.correct import release
from lmcache_kvcmas.kernels.rope import RopeTable
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


def fetch(store: EntryStore, hot: HotTier, piece: Piece, device: torch.device, leases: ExitStack) -> Source | None:
    """The source of ``piece``, or None if any part of it is missing. Open leases go to ``leases``."""
    if piece.delta is not None:
        run = hot.get(piece.delta)
        if run is not None:
            rows = slice(piece.delta_row, piece.delta_row + piece.end - piece.start)
            return Source(run.k[:, rows], run.v[:, rows], run.position + piece.delta_row)
    root = fetch_root(store, piece, device, leases)
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
        return None
    end = piece.delta_row + piece.end - piece.start
    shape = (root.k.shape[0], root.tokens, root.k.shape[2])
    parts = [f.rows(piece.delta_row, end).to(device) for f in (delta_k, delta_v)]
    if any((f.layers, f.tokens, f.channels) != shape for f in parts):
        return None
    return Source(root.k, root.v, root.position, parts[0], parts[1])


def fetch_all(
    store: EntryStore, hot: HotTier, pieces: Sequence[Piece], device: torch.device, leases: ExitStack
) -> list[Source] | Piece:
    """A source for each piece, or the first piece that has none."""
    found = []
    for piece in pieces:
        source = fetch(store, hot, piece, device, leases)
        if source is None:
            return piece
        found.append(source)
    return found


def fetch_root(store: EntryStore, piece: Piece, device: torch.device, leases: ExitStack) -> Source | None:
    """The full-width rows under ``piece``, without its delta."""
    lease = store.get(piece.chunk, EntryKind.BASE)
    if lease is None:
        return None
    leases.enter_context(lease)
    k, v, position = lease.tensors.get("k"), lease.tensors.get("v"), lease.meta.get("position")
    end = piece.row + piece.end - piece.start
    if k is None or v is None or k.shape != v.shape or k.ndim != 3 or not isinstance(position, int):
        return None
    if k.shape[1] < end or position < 0:
        return None
    rows = slice(piece.row, end)
    return Source(k[:, rows].to(device), v[:, rows].to(device), position + piece.row)
