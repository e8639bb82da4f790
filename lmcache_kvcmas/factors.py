"""A stack of matrices kept as low-rank factors, or whole where factors would save nothing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import EntryError
from .kernels.factorise import factorise


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """``x [L, T, C] ≈ u [L, T, r] @ v [L, r, C]``; with ``v`` None, ``u`` is ``x`` itself."""

    u: Tensor
    v: Tensor | None

    @classmethod
    def of(cls, x: Tensor, rank: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> "Factors":
        """Factorise ``x [L, T, C]`` to ``rank``, stored in ``dtype``; kept whole when ``rank >= T·C/(T+C)``."""
        _, tokens, channels = x.shape
        if rank * (tokens + channels) >= tokens * channels:
            return cls(x.to(dtype), None)
        u, v = factorise(x, rank, seed)
        return cls(u.to(dtype), v.to(dtype))

    @property
    def layers(self) -> int:
        return self.u.shape[0]

    @property
    def tokens(self) -> int:
        return self.u.shape[1]

    @property
    def channels(self) -> int:
        return self.u.shape[2] if self.v is None else self.v.shape[2]

    @property
    def nbytes(self) -> int:
        return self.u.nbytes + (0 if self.v is None else self.v.nbytes)

    def expand(self, layer: int, rows: slice = slice(None)) -> Tensor:
        """Layer ``layer`` of the matrix, fp32 ``[n, C]``, all its rows or some."""
        u = self.u[layer, rows].float()
        return u if self.v is None else u @ self.v[layer].float()

    def rows(self, start: int, end: int) -> "Factors":
        """The same for tokens ``[start, end)``: views, nothing is copied."""
        return Factors(self.u[:, start:end], self.v)

    def to(self, device: torch.device | str) -> "Factors":
        return Factors(self.u.to(device), None if self.v is None else self.v.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Named tensors, as an entry stores them."""
        return {"full": self.u} if self.v is None else {"u": self.u, "v": self.v}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Factors":
        """The opposite of ``tensors``.

        Raises:
            EntryError: names, shapes or dtypes do not fit together, or a product of them would not be finite.
        """
        factors = None
        if all(t.ndim == 3 and t.numel() and t.dtype in _DTYPES for t in tensors.values()):
            if set(tensors) == {"full"}:
                factors = cls(tensors["full"], None)
            elif set(tensors) == {"u", "v"}:
                u, v = tensors["u"], tensors["v"]
                if u.dtype == v.dtype and u.shape[0] == v.shape[0] and u.shape[2] == v.shape[1]:
                    factors = cls(u, v)
        if factors is None:
            shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
            raise EntryError(
                "factors are 'full' [L, T, C], or 'u' [L, T, r] and 'v' [L, r, C], "
                f"in float32, bfloat16 or float16; got {shapes}"
            )
        # Bounds every sum of products; NaN fails the comparison.
        largest = math.prod(_amax(t) for t in tensors.values()) * (1 if factors.v is None else factors.v.shape[1])
        if not largest <= _LARGEST:
            raise EntryError(f"factors whose product may reach {largest:.3g}. Allowed: up to {_LARGEST:.3g}.")
        return factors


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST = torch.finfo(torch.float32).max / 2


def _amax(x: Tensor) -> float:
    low, high = (float(bound) for bound in x.aminmax())
    return max(-low, high) if low == low and high == high else math.nan
