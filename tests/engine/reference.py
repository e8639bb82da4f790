"""Logits of a Hugging Face model over a cache that is composed by hand: what the engine is compared with.

Shares no code with the package: rotation, composition and forward are written out here.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

Cache = tuple[Tensor, Tensor]
"""K (rotated) and V, ``[L, H, T, D]`` fp32."""


class Reference:
    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        self.theta, self.dim = config.rope_parameters["rope_theta"], config.head_dim

    @torch.inference_mode()
    def extend(self, past: Cache | None, tokens: list[int]) -> tuple[Cache, Tensor]:
        """The cache of ``tokens`` behind ``past``, alone, and their logits ``[T, V]``."""
        cache = DynamicCache()
        before = 0
        if past is not None:
            before = past[0].shape[2]
            for layer in range(past[0].shape[0]):
                cache.update(past[0][layer][None], past[1][layer][None], layer)
        ids = torch.tensor([tokens])
        positions = torch.arange(before, before + len(tokens))[None]
        out = self.model(input_ids=ids, past_key_values=cache, position_ids=positions, use_cache=True)
        k = torch.stack([layer.keys[0, :, before:] for layer in out.past_key_values.layers])
        v = torch.stack([layer.values[0, :, before:] for layer in out.past_key_values.layers])
        return (k, v), out.logits[0]

    @torch.inference_mode()
    def recomputed(self, cache: Cache, tokens: list[int], positions: list[int]) -> Cache:
        """``cache`` with the rows at ``positions`` computed anew at once: each sees what stands in front of it, and
        of the others their new rows. ``tokens`` are those of all rows."""
        at = torch.tensor(positions)
        kept = torch.ones(cache[0].shape[2], dtype=torch.bool)
        kept[at] = False
        rest = kept.nonzero()[:, 0]
        past = DynamicCache()
        for layer in range(cache[0].shape[0]):
            past.update(cache[0][layer][None, :, rest], cache[1][layer][None, :, rest], layer)
        seen = torch.cat([rest, at])[None] <= at[:, None]
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None]
        ids = torch.tensor(tokens)[at][None]
        out = self.model(
            input_ids=ids, past_key_values=past, position_ids=at[None], attention_mask=mask, use_cache=True
        )
        k, v = cache[0].clone(), cache[1].clone()
        for layer, new in enumerate(out.past_key_values.layers):
            k[layer][:, at], v[layer][:, at] = new.keys[0, :, len(rest) :], new.values[0, :, len(rest) :]
        return k, v

    def moved(self, cache: Cache, by: int | Tensor) -> Cache:
        """The same keys, rotated ``by`` positions further; with ``[T]`` integers, each by its own."""
        half = self.dim // 2
        frequencies = self.theta ** (-torch.arange(0, half, dtype=torch.float64) / half)
        angle = torch.as_tensor(by)[..., None] * frequencies
        cos, sin = angle.cos().float(), angle.sin().float()
        a, b = cache[0][..., :half], cache[0][..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1), cache[1]


def joined(*caches: Cache) -> Cache:
    return torch.cat([c[0] for c in caches], 2), torch.cat([c[1] for c in caches], 2)


def rows(cache: Cache, start: int, end: int) -> Cache:
    return cache[0][:, :, start:end], cache[1][:, :, start:end]
