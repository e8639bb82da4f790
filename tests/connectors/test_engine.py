"""Engines and models that corrections are not defined for are refused by name, before anything is served."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from lmcache_kvcmas.connectors import engine
from lmcache_kvcmas.errors import UnsupportedEngineError, UnsupportedModelError
from lmcache_kvcmas.kernels.rope import RopeTable

TEXT = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def spec(kind: type = FullAttentionSpec, **more: Any) -> Any:
    return kind(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32, **more)


def described(text: dict[str, Any] | None = None, specs: tuple[Any, ...] = (), **changed: Any) -> Any:
    parallel = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**(parallel | {k: v for k, v in changed.items() if k.endswith("_size")})),
        model_config=SimpleNamespace(
            use_mla=changed.get("use_mla", False),
            hf_text_config=TEXT | (text or {}),
            model="somebody/model",
            revision=None,
        ),
        cache_config=SimpleNamespace(cache_dtype=changed.get("cache_dtype", "auto")),
    )
    groups = [SimpleNamespace(kv_cache_spec=s) for s in (specs or (spec(),))]
    return engine.describe(config, SimpleNamespace(kv_cache_groups=groups))


def test_an_ordinary_model_is_described() -> None:
    geometry = described()
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.dtype) == (4, 2, 16, "float32")
    assert described(tensor_parallel_size=2).kv_heads == 1


@pytest.mark.parametrize(
    ("error", "said", "changes"),
    [
        (UnsupportedEngineError, "pipeline_parallel_size is 2", {"pipeline_parallel_size": 2}),
        (UnsupportedEngineError, "decode_context_parallel_size is 2", {"decode_context_parallel_size": 2}),
        (UnsupportedModelError, "MLA", {"use_mla": True}),
        (UnsupportedEngineError, "kv_cache_dtype is 'fp8'", {"cache_dtype": "fp8"}),
        (UnsupportedModelError, "SlidingWindowSpec", {"specs": (spec(SlidingWindowSpec, sliding_window=128),)}),
        (UnsupportedModelError, "windowed attention", {"specs": (spec(sliding_window=128),)}),
        (UnsupportedModelError, "2 group", {"specs": (spec(), spec())}),
        (UnsupportedModelError, "longrope", {"text": {"rope_parameters": {"rope_type": "longrope"}}}),
    ],
)
def test_others_are_refused_by_name(error: type[Exception], said: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=said):
        described(**changes)


def test_an_unknown_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "vllm_version", "0.99.0")
    with pytest.raises(UnsupportedEngineError, match=r"vLLM is 0\.99\.0; this connector knows 0\.32\.x"):
        described()


class Rotary(torch.nn.Module):
    def __init__(self, table: torch.Tensor, neox: bool = True) -> None:
        super().__init__()
        self.cos_sin_cache, self.is_neox_style = table, neox


def test_a_model_that_rotates_otherwise_is_refused() -> None:
    """The config says one thing, the loaded model does another: found before the first wrong key."""
    rope = RopeTable(10000.0 ** (-torch.arange(0, 16, 2) / 16), 16)
    table = torch.cat(rope.span(0, 512), 1)
    engine.check_rope(Rotary(table), rope)
    engine.check_rope(Rotary(1.2 * table), rope)  # YaRN's factor stays in the keys
    with pytest.raises(UnsupportedModelError, match="other angles"):
        engine.check_rope(Rotary(torch.cat(rope.span(1, 513), 1)), rope)
    with pytest.raises(UnsupportedModelError, match="pairs channels"):
        engine.check_rope(Rotary(table, neox=False), rope)
