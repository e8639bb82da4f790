"""What a model's cache looks like: its sizes, its RoPE, and a fingerprint that keeps models apart.

Reads a Hugging Face text config (a mapping, or an object with ``to_dict``). Models for which corrections are not
defined are refused by name, here, before anything is cached.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from .errors import UnsupportedModelError
from .kernels.rope import RopeTable

# How channels pair up is in a model's code, not in its config: models that are in neither list are refused.
_NEOX_TYPES = (
    "apertus arcee exaone gemma gpt_neox granite granitemoe helium llama mistral mixtral nemotron olmo olmo2 olmoe "
    "persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2"
)
_GPTJ_TYPES = "codegen cohere ernie4_5 ernie4_5_moe glm glm4 gptj"
_NEOX = frozenset(_NEOX_TYPES.split())
_GPTJ = frozenset(_GPTJ_TYPES.split())
_ROPES = ("default", "linear", "llama3", "yarn")
# What says where a config came from, not what the model computes.
_IRRELEVANT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding, as far as keys in a cache are concerned: frequencies and pairing, no attention factor."""

    kind: str
    theta: float
    head_dim: int
    rotary_dim: int
    interleaved: bool
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def inv_freq(self) -> Tensor:
        """fp64 ``[rotary_dim / 2]``, radians a position. Sources: Llama 3.1's scaling; YaRN, arXiv 2309.00071."""
        steps = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim
        plain = self.theta**-steps
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            turns = self.original_positions * plain / (2 * math.pi)
            # No width: a step. A tiny one is that, without a division by zero.
            width = max(self.high_freq_factor - self.low_freq_factor, 1e-9)
            smooth = ((turns - self.low_freq_factor) / width).clamp(0, 1)
            return plain / self.factor * (1 - smooth) + plain * smooth
        if self.kind == "yarn":
            low, high = self._turning_dim(self.beta_fast), self._turning_dim(self.beta_slow)
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, self.rotary_dim - 1)
            if low == high:
                high += 0.001
            ramp = ((torch.arange(self.rotary_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
            return plain / self.factor * ramp + plain * (1 - ramp)
        return plain

    def _turning_dim(self, turns: float) -> float:
        """The channel pair that turns ``turns`` times over the original context."""
        ratio = self.original_positions / (turns * 2 * math.pi)
        return self.rotary_dim * math.log(ratio) / (2 * math.log(self.theta))

    def table(self, device: torch.device | str = "cpu") -> RopeTable:
        return RopeTable(self.inv_freq(), self.head_dim, self.rotary_dim, self.interleaved, device)


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Sizes of one rank's cache of one model."""

    layers: int
    kv_heads: int
    """Of one tensor-parallel rank."""
    head_dim: int
    dtype: str
    """Of the cache, as torch spells it: "float32", "bfloat16", "float16"."""
    rope: RopeSpec
    fingerprint: str
    """Hex; the same on all ranks. Says model, revision, RoPE and cache dtype: different ones never share an entry."""

    @property
    def channels(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers, of one rank."""
        return 2 * self.layers * self.channels * self.torch_dtype.itemsize

    @classmethod
    def of(
        cls,
        config: Any,
        *,
        dtype: str,
        fingerprint: str | None = None,
        tp_size: int = 1,
        interleaved: bool | None = None,
    ) -> "ModelGeometry":
        """Geometry of a Hugging Face text config.

        ``fingerprint`` is ``model_fingerprint(...)`` of the weights; without it the config alone is taken.
        ``interleaved`` says how RoPE pairs channels, for a model type that is not known here (an engine knows).
        Raises UnsupportedModelError, naming the cause.
        """
        c = _mapping(config)
        _refuse(c)
        if dtype not in ("float32", "bfloat16", "float16"):
            raise UnsupportedModelError(f"cache dtype is {dtype!r}; it must be float32, bfloat16 or float16")
        heads = int(c["num_attention_heads"])
        kv_heads = int(c.get("num_key_value_heads") or heads)
        head_dim = int(c.get("head_dim") or int(c["hidden_size"]) // heads)
        if kv_heads % tp_size and tp_size % kv_heads:
            raise UnsupportedModelError(f"{kv_heads} KV heads do not divide over {tp_size} tensor-parallel ranks")
        rope = _rope(c, head_dim, interleaved)
        whole = blake3((fingerprint or model_fingerprint(c)).encode())
        whole.update(json.dumps([dtype, asdict(rope)], sort_keys=True).encode())
        return cls(int(c["num_hidden_layers"]), max(1, kv_heads // tp_size), head_dim, dtype, rope, whole.hexdigest())


def model_fingerprint(source: Any, revision: str = "") -> str:
    """Hex blake3 of what makes two models compute different caches.

    Of a folder: its config, its tokenizer, and of each weight file name, size and 16 blocks of 4 KiB, which tells
    fine-tunes apart without reading gigabytes. Of a config: the config, so give a ``revision`` that names the weights.
    """
    digest = blake3(json.dumps(["kvcmas-model", revision]).encode())
    if isinstance(source, (str, Path)):
        folder = Path(source)
        digest.update(_canonical(json.loads((folder / "config.json").read_text("utf-8"))))
        tokenizers = [folder / name for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")]
        for path in (p for p in tokenizers if p.is_file()):
            digest.update(blake3(path.read_bytes()).digest())
        weights = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf", ".pt")]
        for path in sorted(weights):
            size = path.stat().st_size
            digest.update(json.dumps([path.name, size]).encode())
            with path.open("rb") as file:
                for i in range(16):
                    file.seek((size - 4096) * i // 15 if size > 4096 else 0)
                    digest.update(file.read(4096))
    else:
        digest.update(_canonical(_mapping(source)))
    return digest.hexdigest()


def _canonical(config: Mapping[str, Any]) -> bytes:
    return json.dumps({k: v for k, v in config.items() if k not in _IRRELEVANT}, sort_keys=True, default=str).encode()


def _mapping(config: Any) -> dict[str, Any]:
    """The text model's config as a dictionary."""
    c = dict(config) if isinstance(config, Mapping) else dict(config.to_dict())
    if isinstance(c.get("text_config"), Mapping) and "num_hidden_layers" not in c:
        c = dict(c["text_config"])
    missing = [n for n in ("num_hidden_layers", "num_attention_heads", "hidden_size") if not isinstance(c.get(n), int)]
    if missing:
        raise UnsupportedModelError(f"the model's config does not give {', '.join(missing)}")
    return c


def _refuse(c: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for caches that a correction per token, layer and channel does not fit."""
    name = c.get("model_type", "?")

    def no(cause: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"model type {name!r} is not supported: {cause}")

    if c.get("kv_lora_rank"):
        raise no("its cache is latent (MLA: kv_lora_rank is set)")
    if c.get("is_encoder_decoder"):
        raise no("it is an encoder-decoder")
    kinds = {str(k) for k in (c.get("layer_types") or ())} - {"full_attention"}
    if kinds or c.get("layers_block_type") or c.get("attention_chunk_size"):
        raise no(f"not all its layers attend fully (layer_types has {', '.join(sorted(kinds)) or 'other kinds'})")
    if c.get("sliding_window") and c.get("use_sliding_window", True):
        raise no(f"it has sliding-window attention (sliding_window is {c['sliding_window']})")
    if c.get("alibi"):
        raise no("its positions are ALiBi, not RoPE")
    if c.get("no_rope_layers") and not all(c["no_rope_layers"]):
        raise no("some of its layers have no RoPE (no_rope_layers)")
    if c.get("rope_local_base_freq"):
        raise no("its layers differ in RoPE (rope_local_base_freq)")


def _rope(c: Mapping[str, Any], head_dim: int, interleaved: bool | None) -> RopeSpec:
    name = str(c.get("model_type", "?"))
    if interleaved is None:
        if name not in _NEOX | _GPTJ:
            raise UnsupportedModelError(
                f"model type {name!r} is not supported: how its RoPE pairs channels is not known"
            )
        interleaved = name in _GPTJ
    given = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if any(isinstance(v, Mapping) for v in given.values()):
        raise UnsupportedModelError(
            f"model type {name!r} is not supported: its layers differ in RoPE (rope_parameters)"
        )
    p: dict[str, Any] = {**c, **{k: v for k, v in given.items() if v is not None}}
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if given.get("mrope_section") or kind == "mrope" or c.get("mrope_section"):
        raise UnsupportedModelError(f"model type {name!r} is not supported: its RoPE is M-RoPE (mrope_section)")
    if kind not in _ROPES or given.get("use_fope"):
        raise UnsupportedModelError(f"RoPE type {kind!r} is not supported; supported are {', '.join(_ROPES)}")
    theta = p.get("rope_theta") or p.get("rotary_emb_base")
    if name in ("gptj", "codegen"):
        theta = theta or 10000.0  # fixed in their code
    if not theta:
        raise UnsupportedModelError(f"model type {name!r} is not supported: its config gives no rope_theta")
    partial = p.get("partial_rotary_factor") or p.get("rotary_pct") or 1.0
    rotary_dim = int(p.get("rotary_dim") or head_dim * float(partial))
    original = p.get("original_max_position_embeddings") or c.get("max_position_embeddings") or 0
    factor = p.get("factor") or 1.0
    if kind == "yarn" and not p.get("factor"):
        factor = float(c["max_position_embeddings"]) / float(original)
    return RopeSpec(
        kind=kind,
        theta=float(theta),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        factor=float(factor),
        original_positions=int(original),
        low_freq_factor=float(p.get("low_freq_factor") or 1.0),
        high_freq_factor=float(p.get("high_freq_factor") or 4.0),
        beta_fast=float(p.get("beta_fast") or 32.0),
        beta_slow=float(p.get("beta_slow") or 1.0),
        truncate=bool(p.get("truncate", True)),
    )
