"""The model run layer by layer over some of a run's tokens, in a cache that holds all the others: real recompute."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from .dense import Active, DenseModel


class PartialRun:
    """A forward over chosen tokens of a run, on top of an exact prefix; ``partial_run`` makes one.

    ``step`` computes one layer for the tokens in ``rows``: their keys and values replace those in the cache, and they
    attend to everything that the cache then holds in front of them. Only their hidden states exist. Layers are taken in
    order, by the caller, who may let go of tokens in between (``keep``).
    """

    @torch.inference_mode()
    def __init__(self, model: DenseModel, prefix: Active, tokens: Sequence[int], run: Active) -> None:
        self._decoder = model.model.get_decoder()
        self._start = prefix.tokens
        self._tokens = torch.tensor(list(tokens))
        self._cache = _RowCache(prefix.then(run), model.geometry.head_dim)
        self.computed = 0
        """Tokens x layers so far."""
        self.begin(torch.arange(len(tokens)))

    @torch.inference_mode()
    def begin(self, rows: Tensor, hidden: Tensor | None = None) -> None:
        """Choose tokens (rising indices ``[n]`` into the run) and what enters the next layer: ``hidden [n, E]``.

        Without it their embeddings do, so that layer is the first.
        """
        self.rows = rows
        self.hidden: Tensor = self._decoder.embed_tokens(self._tokens[rows]) if hidden is None else hidden

    def keep(self, rows: Tensor) -> None:
        """Go on with ``rows`` only, which must be among the present ones."""
        kept = torch.isin(self.rows, rows)
        if int(kept.sum()) != len(rows):
            raise ValueError("rows to keep must be among those that are being computed")
        self.rows, self.hidden = self.rows[kept], self.hidden[kept]

    @torch.inference_mode()
    def step(self, layer: int, watch: bool = False) -> Tensor | None:
        """Compute layer ``layer``; with ``watch``, its attention weights ``[heads, n, T]`` on the run's tokens."""
        if not len(self.rows):
            return None
        positions = self._start + self.rows
        self._cache.positions = positions
        seen = torch.arange(self._start + len(self._tokens))[None] <= positions[:, None]
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None]
        x = self.hidden[None]
        block = self._decoder.layers[layer]
        watched = _Watch(block.self_attn) if watch else None
        try:
            out = block(
                x,
                attention_mask=mask,
                position_ids=positions[None],
                position_embeddings=self._decoder.rotary_emb(x, position_ids=positions[None]),
                past_key_values=self._cache,
                use_cache=True,
            )
        finally:
            weights = watched.stop() if watched else None
        self.hidden = (out[0] if isinstance(out, tuple) else out)[0]
        self.computed += len(self.rows)
        return None if weights is None else weights[0, :, :, self._start :]

    def keys(self, layer: int) -> Tensor:
        """The run's rotated keys of one layer, fp32 ``[T, C]``, as the cache holds them now."""
        return _rows(self._cache.k[layer, :, self._start :])

    @property
    def active(self) -> Active:
        """The run's cache as it is now."""
        k, v = (torch.stack([_rows(x[:, self._start :]) for x in side]) for side in (self._cache.k, self._cache.v))
        return Active(k, v)

    @property
    def share(self) -> float:
        """``computed`` ÷ the run's tokens x layers."""
        return self.computed / (len(self._tokens) * len(self._cache.k))


class _RowCache:
    """What a layer of transformers' takes for a cache: rows are replaced where they stand, nothing grows."""

    def __init__(self, whole: Active, head_dim: int) -> None:
        layers, tokens, channels = whole.k.shape
        shape = (layers, tokens, channels // head_dim, head_dim)
        self.k, self.v = (x.reshape(shape).transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in whole)
        self.positions = torch.arange(0)

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.k[layer, :, self.positions] = k[0]
        self.v[layer, :, self.positions] = v[0]
        return self.k[layer][None], self.v[layer][None]


class _Watch:
    """Makes one attention module show its weights: the plain implementation returns them, faster ones do not."""

    def __init__(self, attention: Any) -> None:
        self._config = attention.config
        self._before = self._config._attn_implementation
        self._config._attn_implementation = "eager"
        self._weights: Tensor | None = None
        self._hook = attention.register_forward_hook(self._note)

    def _note(self, module: Any, inputs: Any, output: Any) -> None:
        self._weights = output[1]

    def stop(self) -> Tensor | None:
        self._hook.remove()
        self._config._attn_implementation = self._before
        return self._weights


def partial_run(model: DenseModel, prefix: Active, tokens: Sequence[int], run: Active) -> PartialRun:
    """Raises UnsupportedModelError when layer by layer is not what the model's own forward computes."""
    _prove(model)
    return PartialRun(model, prefix, tokens, run)


def entering(model: DenseModel, prefix: Active, tokens: Sequence[int], layer: int) -> Tensor:
    """Hidden states ``[T, E]`` that enter ``layer``, of ``tokens`` on top of an exact prefix."""
    shape = (model.geometry.layers, len(tokens), model.geometry.channels)
    run = partial_run(model, prefix, tokens, Active(torch.zeros(shape), torch.zeros(shape)))
    for below in range(layer):
        run.step(below)
    return run.hidden


@lru_cache(maxsize=1)
def _prove(model: DenseModel) -> None:
    """Compare with the model's own forward: some scale embeddings or carry more from layer to layer than we do."""
    tokens = list(range(8))
    dense, _ = model.extend(None, tokens)
    empty = Active(dense.k[:, :0], dense.v[:, :0])
    try:
        run = PartialRun(model, empty, tokens, Active(torch.zeros_like(dense.k), torch.zeros_like(dense.v)))
        for layer in range(model.geometry.layers):
            run.step(layer)
        same = all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(run.active, dense, strict=True))
    except (AttributeError, TypeError) as error:
        raise UnsupportedModelError(f"model {model.name} cannot be run layer by layer: {error}") from error
    if not same:
        raise UnsupportedModelError(f"model {model.name} cannot be run layer by layer: its caches come out differently")


def _rows(heads: Tensor) -> Tensor:
    """``[T, C]`` of ``[H, T, D]``."""
    return heads.transpose(0, 1).reshape(heads.shape[1], -1)
