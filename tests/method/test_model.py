"""Which models corrections are defined for. A model let in by mistake would serve wrong caches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lmcache_kvcmas.errors import UnsupportedModelError
from lmcache_kvcmas.model import ModelGeometry, model_fingerprint

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 512,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
]


def geometry(**changes: Any) -> ModelGeometry:
    return ModelGeometry.of({k: v for k, v in {**LLAMA, **changes}.items() if v is not None}, dtype="float32")


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("modern", [True, False])
def test_frequencies_are_transformers_own(scaling: dict[str, Any], modern: bool) -> None:
    """Both spellings of a config (rope_parameters, and rope_theta with rope_scaling) give the model's frequencies."""
    c = {**LLAMA, "rope_parameters": {**scaling, "rope_theta": 500000.0}}
    if modern:
        del c["rope_theta"]
    theirs, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](AutoConfig.for_model(**c), "cpu")
    ours = ModelGeometry.of(c if modern else {**LLAMA, "rope_scaling": scaling}, dtype="float32").rope.inv_freq()
    torch.testing.assert_close(ours.float(), theirs, rtol=2e-6, atol=0)


def test_default_and_partial_rotary() -> None:
    rope = geometry().rope
    expected = 500000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    torch.testing.assert_close(rope.inv_freq(), expected)
    partial = geometry(partial_rotary_factor=0.5).rope
    assert (partial.rotary_dim, partial.head_dim) == (32, 64)
    torch.testing.assert_close(partial.inv_freq(), 500000.0 ** -(torch.arange(0, 32, 2).double() / 32))


def test_pairing_follows_the_model_type() -> None:
    assert not geometry().rope.interleaved
    assert geometry(model_type="glm4").rope.interleaved
    assert ModelGeometry.of({**LLAMA, "model_type": "new"}, dtype="float32", interleaved=True).rope.interleaved


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"sliding_window": 4096}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "M-RoPE"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24]}}, "M-RoPE"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "'proportional'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}}, "differ in RoPE"),
        ({"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ({"rope_theta": None}, "rope_theta"),
        ({"alibi": True}, "ALiBi"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "brand_new"}, "'brand_new'"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(UnsupportedModelError, match=cause):
        geometry(**changes)


def test_a_window_that_is_switched_off_is_none() -> None:
    """Qwen2 configs carry a sliding_window that is not used."""
    assert geometry(model_type="qwen2", sliding_window=4096, use_sliding_window=False).layers == 4


def test_sizes_and_tensor_parallel_ranks() -> None:
    assert (geometry().channels, geometry().bytes_per_token) == (256, 2 * 4 * 256 * 4)
    two = ModelGeometry.of(LLAMA, dtype="bfloat16", tp_size=2)
    assert (two.kv_heads, two.bytes_per_token) == (2, 2 * 4 * 128 * 2)
    assert ModelGeometry.of(LLAMA, dtype="bfloat16", tp_size=8).kv_heads == 1
    assert two.fingerprint == ModelGeometry.of(LLAMA, dtype="bfloat16").fingerprint
    with pytest.raises(UnsupportedModelError, match="4 KV heads do not divide over 3"):
        ModelGeometry.of(LLAMA, dtype="bfloat16", tp_size=3)
    with pytest.raises(UnsupportedModelError, match="int8"):
        ModelGeometry.of(LLAMA, dtype="int8")


def test_fingerprints_keep_models_apart(tmp_path: Path) -> None:
    """Two fine-tunes with one config must never meet in a store; a moved folder must."""

    def folder(name: str, weight: int, config: dict[str, Any], tokenizer: str = "{}") -> str:
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        (path / "tokenizer.json").write_text(tokenizer)
        (path / "model.safetensors").write_bytes(bytes([weight]) * 100_000)
        return model_fingerprint(path)

    first = folder("a", 1, LLAMA)
    assert first == folder("b", 1, {**LLAMA, "_name_or_path": "elsewhere"})
    others = [
        folder("c", 2, LLAMA),
        folder("d", 1, {**LLAMA, "rope_theta": 1e6}),
        folder("e", 1, LLAMA, '{"x": 1}'),
        model_fingerprint(tmp_path / "a", "r2"),
        model_fingerprint(LLAMA),
    ]
    assert len({first, *others}) == 6
    assert geometry().fingerprint != ModelGeometry.of(LLAMA, dtype="bfloat16").fingerprint
