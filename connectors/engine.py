"""What this vLLM is, and whether we were built for it. Everything unknown is refused by name, at start-up."""

from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from lmcache_kvcmas.errors import UnsupportedEngineError, UnsupportedModelError
from lmcache_kvcmas.kernels.rope import RopeTable
from lmcache_kvcmas.model import ModelGeometry, model_fingerprint

KNOWN_VERSIONS = ("0.32.", "0.33.")


def describe(config: VllmConfig, caches: KVCacheConfig) -> ModelGeometry:
    """Geometry of one rank's cache.

    Raises:
        UnsupportedEngineError, UnsupportedModelError: corrections are not defined for it; the message names the cause.
    """
    if not vllm_version.startswith(KNOWN_VERSIONS):
        known = " and ".join(v + "x" for v in KNOWN_VERSIONS)
        raise UnsupportedEngineError(f"vLLM is {vllm_version}; this connector knows {known}")
    parallel, model = config.parallel_config, config.model_config
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedEngineError(f"pipeline_parallel_size is {parallel.pipeline_parallel_size}; it must be 1")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedEngineError(f"{name} is {getattr(parallel, name)}; it must be 1")
    if getattr(model, "use_mla", False):
        raise UnsupportedModelError("the model uses multi-head latent attention (MLA), which has no K and V to correct")
    kinds = sorted({_kind(group.kv_cache_spec) for group in caches.kv_cache_groups})
    if len(caches.kv_cache_groups) != 1 or kinds != ["full attention"]:
        raise UnsupportedModelError(
            f"the cache has {len(caches.kv_cache_groups)} group(s) of {', '.join(kinds) or 'nothing'}; it must have "
            "one of full attention (no sliding windows, no Mamba, no hybrids)"
        )
    dtype = config.cache_config.cache_dtype
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise UnsupportedEngineError(f"kv_cache_dtype is {dtype!r}; it must be auto: corrections need plain values")
    stored = str(caches.kv_cache_groups[0].kv_cache_spec.dtype).removeprefix("torch.")
    return ModelGeometry.of(
        model.hf_text_config,
        dtype=stored,
        fingerprint=_fingerprint(model),
        tp_size=parallel.tensor_parallel_size,
    )


def _fingerprint(model: Any) -> str:
    """Of the weights where they are a folder here, else of the config and the revision that names them."""
    try:
        return model_fingerprint(model.model, model.revision or "")
    except OSError:
        return model_fingerprint(model.hf_text_config, f"{model.model}@{model.revision or ''}")


def _kind(spec: Any) -> str:
    if type(spec) is not FullAttentionSpec:
        return type(spec).__name__
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "windowed attention"
    return "full attention"


def check_rope(model: torch.nn.Module, rope: RopeTable) -> None:
    """Compare our angles with the ones the loaded model uses.

    Raises:
        UnsupportedModelError: it rotates keys in another way than its config made us believe.
    """
    for module in model.modules():
        table = getattr(module, "cos_sin_cache", None)
        if not isinstance(table, torch.Tensor) or table.ndim != 2:
            continue
        if getattr(module, "is_neox_style", not rope.interleaved) == rope.interleaved:
            raise UnsupportedModelError(f"{type(module).__name__} pairs channels in another way than expected")
        count = min(512, len(table))
        cos, sin = rope.span(0, count)
        ours = torch.cat([cos, sin], 1).to(table.device)
        theirs = table[:count].float()
        # The model may keep a constant factor (YaRN's) and bf16's rounding in its table.
        if ours.shape != theirs.shape or (theirs / theirs[0, 0] - ours).abs().max() > 0.02:
            raise UnsupportedModelError(f"{type(module).__name__} uses other angles than the model's config says")
        return
