"""The default: every token attends to all tokens of all anchors, in the edge basis (design, section 3.4).

``d²_tj = ‖z_t − z_j‖² + 0.02·(log2(1+t) − log2(1+j))²``, ``m_t = min_j d²_tj``,
``a_tj = softmax_j(−(d²_tj − m_t)/min(m_t + 1e-3, 0.1))``, ``Δ̂_t = Σ_j a_tj·δ_j``.
"""

import torch
from torch import Tensor

from ..anchors import PoolState
from ..basis import EdgeBasis
from .base import LayerPrediction, Predictor, ReadLayer

_POSITION = 0.02
_COLDEST = 1e-3
_HOTTEST = 0.1
_FAINTEST = -60.0  # e⁻⁶⁰ is nothing beside the nearest's 1; below e⁻⁸⁷ lie denormals, which slow a CPU down manifold
_CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}  # of weights at a time: what stays in a CPU's cache, or feeds a GPU


class AttentionPredictor:
    """Softmax attention over the pool's tokens; one weight matrix serves K and V.

    All the work is GEMMs. The position is one more coordinate of z. A column of ones and two of ``‖δ‖²`` beside each
    anchor's U give the softmax's denominator, the anchor's mass and the first half of the spread, in the same GEMM.
    """

    def __init__(self, pool: PoolState, device: str = "cpu") -> None:
        anchors = pool.anchors
        self.version = pool.version
        basis = EdgeBasis.of(anchors)
        z, p = basis.tokens, _position(torch.cat([a.offsets for a in anchors]))
        self._basis = basis.projection(device)
        # d² = q_t + ‖z_j‖² − 2 z_t·z_j: the two last terms are one GEMM of [z_t, p_t, 1] with these rows.
        columns = z.shape[0], z.shape[1], 1
        self._keys = torch.cat(
            [-2 * z, (-2 * p)[None, :, None].expand(columns), (z.square().sum(2) + p * p)[..., None]], 2
        )
        self._keys = self._keys.mT.contiguous().to(device)
        self._tokens = [a.tokens for a in anchors]
        # fp32, unlike the factors themselves: converting them for every run costs more than a short run's GEMMs.
        lefts = [(_left(a.delta_k.u, a.delta_k.v), _left(a.delta_v.u, a.delta_v.v)) for a in anchors]
        extras = [torch.stack([torch.ones_like(a.norm2_k), a.norm2_k, a.norm2_v], 2) for a in anchors]
        self._left = [torch.cat([*map(Tensor.float, u), x], 2).to(device) for u, x in zip(lefts, extras, strict=True)]
        self._ranks = [(u_k.shape[2], u_v.shape[2]) for u_k, u_v in lefts]
        self._right_k = torch.cat([_right(a.delta_k.u, a.delta_k.v) for a in anchors], 1).to(device)
        self._right_v = torch.cat([_right(a.delta_v.u, a.delta_v.v) for a in anchors], 1).to(device)
        rows = _CHUNK_BYTES.get(torch.device(device).type, 64 << 20) // (4 * sum(self._tokens))
        self._chunk = max(64, rows)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self._left, self._keys, self._right_k, self._right_v))

    def bind(self, read: ReadLayer, offsets: Tensor) -> Predictor:
        return self

    def layer(self, layer: int, k: Tensor, v: Tensor, offsets: Tensor) -> LayerPrediction:
        if layer == 0:
            return LayerPrediction()
        tokens, channels = k.shape
        device = k.device
        position = _position(offsets.to(device))
        query = torch.cat([self._basis.z(layer, k, v), position[:, None], torch.ones(tokens, 1, device=device)], 1)
        norms = query[:, :-1].square().sum(1)
        left = [x[layer] for x in self._left]
        right_k, right_v = self._right_k[layer].float(), self._right_v[layer].float()
        delta_k, delta_v = (torch.empty(tokens, channels, device=device) for _ in range(2))
        sums = torch.empty(tokens, 2, device=device)
        mass = torch.zeros(len(left), device=device)
        weights = torch.empty(min(self._chunk, tokens), sum(self._tokens), device=device)
        for start in range(0, tokens, self._chunk):
            end = min(start + self._chunk, tokens)
            a = weights[: end - start]
            torch.mm(query[start:end], self._keys[layer], out=a)
            nearest = a.amin(1)
            heat = (nearest + norms[start:end]).clamp_min_(0).add_(_COLDEST).clamp_max_(_HOTTEST)
            a.sub_(nearest[:, None]).mul_(heat.reciprocal_().neg_()[:, None]).clamp_min_(_FAINTEST).exp_()
            mixed = [part @ u for part, u in zip(torch.split(a, self._tokens, 1), left, strict=True)]
            extras = torch.stack([m[:, -3:] for m in mixed])
            scale = extras[..., 0].sum(0).reciprocal_()
            mass += extras[..., 0] @ scale
            torch.mul(extras[..., 1:].sum(0), scale[:, None], out=sums[start:end])
            coefficients = zip(mixed, self._ranks, strict=True)
            parts = [(m[:, :rk], m[:, rk : rk + rv]) for m, (rk, rv) in coefficients]
            torch.mm(torch.cat([p[0] for p in parts], 1).mul_(scale[:, None]), right_k, out=delta_k[start:end])
            torch.mm(torch.cat([p[1] for p in parts], 1).mul_(scale[:, None]), right_v, out=delta_v[start:end])
        spread_k = (sums[:, 0] - delta_k.square().sum(1)).clamp_min_(0)
        spread_v = (sums[:, 1] - delta_v.square().sum(1)).clamp_min_(0)
        return LayerPrediction(delta_k, delta_v, spread_k, spread_v, mass / tokens)


def _position(offsets: Tensor) -> Tensor:
    """The coordinate whose squared difference is the position's part of d²."""
    return torch.log2(1 + offsets.float()).mul_(_POSITION**0.5)


def _left(u: Tensor, v: Tensor | None) -> Tensor:
    """U of factors; for a delta that was kept whole, the identity."""
    return u if v is not None else torch.eye(u.shape[1], dtype=u.dtype).expand(u.shape[0], -1, -1)


def _right(u: Tensor, v: Tensor | None) -> Tensor:
    return u if v is None else v
