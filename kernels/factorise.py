"""Truncated factorisation of a stack of matrices.

Subspace iteration (Halko, Martinsson and Tropp, arXiv 0909.4061, algorithms 4.4 and 5.3) instead of a full
eigendecomposition: the 192 x 192 Gram matrices of 30 layers take LAPACK's eigh seconds where this takes milliseconds,
for the same energy kept. Up to 256 channels (or tokens) it iterates on the Gram matrix, which makes its steps nearly
free; above that on the matrix itself.

The small dense steps (QR, eigh of ``r + 8`` columns) go through numpy on the CPU: torch's run on MKL with a thread team
for each tiny matrix, which is 3 times slower on an idle machine and 100 times slower beside a busy engine.
"""

import numpy as np
import torch
from torch import Tensor

_OVERSAMPLE = 8
_GRAM_LIMIT = 256
_GRAM_STEPS = 4  # steps on the Gram matrix cost C², not T·C
_MATRIX_STEPS = 2


def factorise(x: Tensor, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Factors ``u [L, T, r]`` and ``v [L, r, C]`` with ``u @ v ≈ x [L, T, C]``, fp32; ``r = min(rank, T, C)``.

    The rows of ``v`` are orthonormal and in falling order of energy, so ``u[..., :q] @ v[..., :q, :]`` is the
    truncation to ``q``. Deterministic for one ``seed`` on one device.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; it must be at least 1")
    _, tokens, channels = x.shape
    x = x.float()
    rank = min(rank, tokens, channels)
    if tokens < channels and tokens <= _GRAM_LIMIT:
        # Few tokens: find the left space, on the smaller Gram matrix, then turn it into orthonormal rows of v.
        left = leading(x @ x.mT, rank, seed)
        v = left.mT @ x
        scale = torch.linalg.vector_norm(v, dim=2, keepdim=True)
        # A direction without energy has no right vector: zero rows say so, and lose nothing.
        kept = torch.where(scale > 0, scale, torch.ones_like(scale))
        return left * scale.mT, v / kept
    if channels <= _GRAM_LIMIT:
        right = leading(x.mT @ x, rank, seed)
    else:
        basis = _start(x, channels, rank, seed)
        for _ in range(_MATRIX_STEPS + 1):
            basis = _orthonormal(x.mT @ (x @ basis))
        inner = x @ basis
        right = basis @ _ordered(inner.mT @ inner, rank)
    return x @ right, right.mT.contiguous()


def _start(x: Tensor, size: int, rank: int, seed: int) -> Tensor:
    """Seeded on the CPU, so that every device starts from the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, size, min(rank + _OVERSAMPLE, size, x.shape[1]), generator=generator).to(x.device)


def _ordered(small: Tensor, rank: int) -> Tensor:
    """The ``rank`` leading eigenvectors of small symmetric matrices, in falling order."""
    vectors = np.linalg.eigh(small.double().cpu().numpy()).eigenvectors
    return torch.from_numpy(vectors).flip(-1)[..., :rank].float().to(small.device)


def _orthonormal(columns: Tensor) -> Tensor:
    return torch.from_numpy(np.linalg.qr(columns.cpu().numpy()).Q).to(columns.device)


def leading(gram: Tensor, rank: int, seed: int = 0) -> Tensor:
    """Leading eigenvectors ``[L, n, rank]``, in falling order, of symmetric non-negative ``gram [L, n, n]``."""
    basis = _start(gram, gram.shape[-1], rank, seed).expand(gram.shape[0], -1, -1)
    for _ in range(_GRAM_STEPS):
        basis = _orthonormal(gram @ basis)
    return basis @ _ordered(basis.mT @ gram @ basis, rank)
