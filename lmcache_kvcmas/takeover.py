"""The active cache of a prompt's spans: sources rotated, corrected and written, layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmcache_kvcmas.gate import Reliability
from lmcache_kvcmas.kernels.correct import correct
from lmcache_kvcmas.kernels.rope import RopeTable
from lmcache_kvcmas.lessons import Stretch
from lmcache_kvcmas.predict import Predictor
from lmcache_kvcmas.sources import Source
from lmcache_kvcmas.spans import Span, SpanKind

Write = Callable[[int, Tensor, Tensor], None]
"""Stores one layer's ``k`` and ``v``, ``[T, C]`` in the cache's dtype, where the span belongs."""


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What one PREDICTED span leaves to be judged."""

    span: Span
    reliability: Reliability
    """Of this rank's heads."""
    mass: Tensor | None
    """fp32 ``[A]``: each anchor's share of the weights, mean over layers."""


def take_over(span: Span, sources: Sequence[Source], rope: RopeTable, dtype: torch.dtype, write: Write) -> None:
    """Write an EXACT or OWN span: its own cache, moved by a constant where it stood elsewhere."""
    layers = sources[0].k.shape[0]
    exact = span.kind is SpanKind.EXACT
    if exact and any(s.position != p.start for s, p in zip(sources, span.pieces, strict=True)):
        raise ValueError("an exact span's cache must come from the positions that it goes to")
    cos, sin = rope.span(span.start, span.end)
    whole = Stretch(sources)
    moved = all(s.delta_k is None for s in sources)
    for layer in range(layers):
        if moved:
            at = zip(sources, span.pieces, strict=True)
            k = torch.cat([rope.moved(s.k[layer], p.start - s.position) for s, p in at])
            write(layer, k.to(dtype), torch.cat([s.v[layer] for s in sources]).to(dtype))
        else:
            free_k, free_v = whole.free(rope, layer)
            write(layer, *correct(rope, free_k, free_v, None, None, cos, sin, dtype))


def predict(
    span: Span, sources: Sequence[Source], predictor: Predictor, rope: RopeTable, dtype: torch.dtype, write: Write
) -> Prediction:
    """Write a PREDICTED span, corrected, and say how far the anchors that were mixed agree.

    The gate judges afterwards: what it refuses is computed again by the engine, so writing first costs nothing more.
    """
    layers = sources[0].k.shape[0]
    whole = Stretch(sources)
    device = sources[0].k.device
    offsets = torch.arange(span.offset, span.offset + span.end - span.start, device=device)
    cos, sin = rope.span(span.start, span.end)
    bound = predictor.bind(lambda layer: whole.free(rope, layer), offsets)
    reliability = Reliability(layers, span.end - span.start, device)
    masses = []
    for layer in range(layers):
        k, v = whole.free(rope, layer)
        predicted = bound.layer(layer, k, v, offsets)
        reliability.add(layer, predicted, k, v)
        if predicted.mass is not None:
            masses.append(predicted.mass)
        write(layer, *correct(rope, k, v, predicted.delta_k, predicted.delta_v, cos, sin, dtype))
    mass = torch.stack(masses).mean(0) if masses else None
    return Prediction(span, reliability, mass)
