"""Rotary position embedding as an operation on cached keys (RoFormer, arXiv 2104.09864, section 3.2).

Keys in a cache are rotated already. Rotating them back gives *position-free* keys; rotating those forward puts them
anywhere. Everything here is a pure rotation: a factor that a model multiplies into its cosines (YaRN's attention
factor) is part of the cached keys, stays in them, and is never applied again.
"""

import torch
from torch import Tensor

_GROWTH = 4096  # positions a table grows by, at least


class RopeTable:
    """Cosines and sines of one RoPE, grown on demand, shared by all layers.

    ``inv_freq`` is ``[rotary_dim / 2]``, in radians a position. ``interleaved`` says how channels pair up: False for
    NeoX (channel i with i + rotary_dim/2), True for GPT-J (channel 2i with 2i + 1). Raises ValueError on sizes that do
    not fit together.
    """

    def __init__(
        self,
        inv_freq: Tensor,
        head_dim: int,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if inv_freq.ndim != 1 or 2 * inv_freq.numel() != rotary_dim or not 0 < rotary_dim <= head_dim:
            raise ValueError(
                f"inv_freq of shape {tuple(inv_freq.shape)} does not fit rotary_dim {rotary_dim} and head_dim "
                f"{head_dim}: it must be [rotary_dim / 2], and 0 < rotary_dim <= head_dim"
            )
        self.head_dim = head_dim
        self.rotary_dim = rotary_dim
        self.interleaved = interleaved
        self.device = torch.device(device)
        self._inv_freq = inv_freq.detach().to("cpu", torch.float64)
        self._cos = torch.empty(0, rotary_dim // 2, device=self.device)
        self._sin = torch.empty(0, rotary_dim // 2, device=self.device)

    def reserve(self, positions: int) -> None:
        """Make the table hold positions ``[0, positions)``. Angles in fp64: at 100k they lose 1e-2 rad in fp32."""
        have = self._cos.shape[0]
        if positions <= have:
            return
        grown = max(positions, have + _GROWTH)
        angles = torch.arange(grown, dtype=torch.float64)[:, None] * self._inv_freq
        self._cos = angles.cos().float().to(self.device)
        self._sin = angles.sin().float().to(self.device)

    def span(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each fp32 ``[end - start, rotary_dim/2]``, of consecutive positions: views, nothing is copied."""
        self.reserve(end)
        return self._cos[start:end], self._sin[start:end]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each fp32 ``[T, rotary_dim/2]``, of integer ``positions [T]`` (none negative)."""
        if positions.numel():
            self.reserve(int(positions.max()) + 1)
        index = positions.to(self.device, torch.long)
        return self._cos[index], self._sin[index]

    def shift(self, by: int) -> Tensor:
        """The rotation by ``by`` positions (either sign) as one fp32 matrix ``[D, D]``, for keys ``k @ matrix``."""
        self.reserve(abs(by) + 1)
        cos, sin = self._cos[abs(by)], self._sin[abs(by)] * (1 if by >= 0 else -1)
        first, second = _pairs(self.rotary_dim, self.interleaved, self.device)
        matrix = torch.eye(self.head_dim, device=self.device)
        matrix[first, first] = cos
        matrix[second, second] = cos
        matrix[first, second] = sin
        matrix[second, first] = -sin
        return matrix

    def rotate(self, k: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        """``rotate`` with this table's head dim and pairing."""
        return rotate(k, cos, sin, self.head_dim, interleaved=self.interleaved, inverse=inverse)

    def moved(self, k: Tensor, by: int) -> Tensor:
        """``k [T, C]`` moved by a constant ``by``: bit-identical for 0, else one GEMM in fp32, several times faster."""
        if by == 0:
            return k
        heads = k.reshape(-1, self.head_dim).float()
        return (heads @ self.shift(by)).to(k.dtype).reshape(k.shape)


def _pairs(rotary_dim: int, interleaved: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    half = rotary_dim // 2
    if interleaved:
        first = torch.arange(0, rotary_dim, 2, device=device)
        return first, first + 1
    first = torch.arange(half, device=device)
    return first, first + half


def rotate(
    k: Tensor, cos: Tensor, sin: Tensor, head_dim: int, *, interleaved: bool = False, inverse: bool = False
) -> Tensor:
    """Rotate keys ``[T, C]`` or ``[T, H, D]`` by angles given as ``cos, sin [T, rotary_dim/2]``.

    Channels of a head beyond ``rotary_dim`` pass through. Computed in fp32, returned in ``k``'s dtype and shape.
    ``inverse`` rotates back.
    """
    half = cos.shape[-1]
    x = k.reshape(k.shape[0], -1, head_dim).float()
    out = torch.empty_like(x)
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        out_a, out_b = out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        out_a, out_b = out[..., :half], out[..., half : 2 * half]
    c, s = cos[:, None, :], sin[:, None, :]
    sign = -1 if inverse else 1
    torch.mul(a, c, out=out_a)
    out_a.addcmul_(b, s, value=-sign)
    torch.mul(b, c, out=out_b)
    out_b.addcmul_(a, s, value=sign)
    if 2 * half < head_dim:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out.to(k.dtype).reshape(k.shape)
