"""A Hugging Face model, run the plain way: what everything else is measured against."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..anchors import Caches
from ..errors import ConfigError, UnsupportedModelError
from ..kernels.correct import release
from ..model import ModelGeometry, model_fingerprint


class Active(NamedTuple):
    """What attention reads: keys (rotated at their positions) and values, each ``[L, T, C]``."""

    k: Tensor
    v: Tensor

    @property
    def tokens(self) -> int:
        return int(self.k.shape[1])

    def rows(self, start: int, end: int) -> "Active":
        return Active(self.k[:, start:end], self.v[:, start:end])

    def then(self, other: "Active") -> "Active":
        return Active(torch.cat([self.k, other.k], 1), torch.cat([self.v, other.v], 1))


class Prompt(NamedTuple):
    """Tokens of one agent's prompt: its role in front, the shared context (the run), its instruction behind."""

    prefix: list[int]
    run: list[int]
    suffix: list[int]


class Answer(NamedTuple):
    """A continuation of a prompt."""

    tokens: list[int]
    logp: Tensor
    """fp32 ``[n, V]``: what each token was chosen from."""


_MARK = "\u2042context\u2042"


class DenseModel:
    """A causal language model in fp32 on the CPU, with its tokenizer and chat template.

    Raises ConfigError when the folder cannot be loaded, UnsupportedModelError when corrections do not fit the model.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model {folder}: not a Hugging Face model folder (it has no config.json)")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.name = folder.name
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not self.tokenizer.chat_template:
            raise ConfigError(f"--model {folder}: its tokenizer has no chat template")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.model.eval()
        self.geometry = ModelGeometry.of(self.model.config, dtype="float32", fingerprint=model_fingerprint(folder))
        self.rope = self.geometry.rope.table()
        ends = self.model.generation_config.eos_token_id
        self._ends = torch.tensor(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def prompt(self, role: str, context: str, instruction: str) -> Prompt:
        """System message ``role``, user message ``context + instruction``, tokenised apart at the context's borders."""
        messages = [{"role": "system", "content": role}, {"role": "user", "content": _MARK + instruction}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        parts = text.split(_MARK)
        if len(parts) != 2:
            raise UnsupportedModelError("the chat template does not put the user's message into the prompt once")
        return Prompt(*(self.tokenizer.encode(t, add_special_tokens=False) for t in (parts[0], context, parts[1])))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a chat request, up to where the answer begins."""
        return list(
            self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False, tokenize=True
            )
        )

    @torch.inference_mode()
    def extend(self, past: Active | None, tokens: Sequence[int], keep: int = 1) -> tuple[Active, Tensor]:
        """Run ``tokens`` on top of ``past``: their cache alone, and fp32 logits ``[keep, V]`` of the last ``keep``."""
        start = past.tokens if past is not None else 0
        cache = self._cache([past] if past is not None else [])
        logits = self._forward(cache, start, tokens, keep, 1)
        shape = (start + len(tokens), self.geometry.channels)
        k, v = (
            torch.stack([getattr(layer, name)[0].transpose(0, 1).reshape(shape) for layer in cache.layers])
            for name in ("keys", "values")
        )
        return Active(k, v).rows(start, shape[0]), logits[0]

    @torch.inference_mode()
    def compare(self, pasts: Sequence[Active], tokens: Sequence[int], keep: int) -> Tensor:
        """Log-probabilities ``[B, keep, V]`` of the last ``keep`` of ``tokens``, on ``B`` pasts of one length."""
        return torch.log_softmax(self._forward(self._cache(pasts), pasts[0].tokens, tokens, keep, len(pasts)), -1)

    @torch.inference_mode()
    def grow(self, pasts: Sequence[Active], tokens: Sequence[int], keep: int) -> tuple[list[Active], Tensor]:
        """Run the same ``tokens`` on pasts of one length: whole caches, and log-probabilities ``[B, keep, V]``."""
        cache = self._cache(pasts)
        logp = torch.log_softmax(self._forward(cache, pasts[0].tokens, tokens, keep, len(pasts)), -1)
        k, v = (
            [getattr(layer, name).transpose(1, 2).flatten(2) for layer in cache.layers] for name in ("keys", "values")
        )
        rows = range(len(pasts))
        return [Active(torch.stack([x[i] for x in k]), torch.stack([x[i] for x in v])) for i in rows], logp

    @torch.inference_mode()
    def generate(
        self,
        pasts: Sequence[Active],
        tokens: Sequence[int],
        steps: int,
        noise: Tensor | None = None,
        stop: bool = True,
    ) -> list[Answer]:
        """Continue ``tokens`` on each of ``pasts``, which are of one length, by at most ``steps`` tokens.

        Greedy; with Gumbel ``noise [steps, V]`` (temperature in it), sampled: the same noise for all, so that two
        caches that hardly differ say the same. With ``stop``, an answer ends with the end-of-turn token.
        """
        cache, start = self._cache(pasts), pasts[0].tokens
        fed = torch.tensor([list(tokens)]).expand(len(pasts), -1)
        logps, chosen = [], []
        ended = torch.zeros(len(pasts), dtype=torch.bool)
        for step in range(steps):
            logp = torch.log_softmax(self._forward(cache, start, fed, 1, len(pasts))[:, -1], -1)
            start += fed.shape[1]
            fed = (logp if noise is None else logp + noise[step]).argmax(1, keepdim=True)
            logps.append(logp)
            chosen.append(fed[:, 0])
            ended |= torch.isin(fed[:, 0], self._ends)
            if stop and bool(ended.all()):
                break
        whole, seen = torch.stack(chosen, 1), torch.stack(logps, 1)
        return [self._answer(whole[i], seen[i], stop) for i in range(len(pasts))]

    def _answer(self, tokens: Tensor, logp: Tensor, stop: bool) -> Answer:
        ends = torch.isin(tokens, self._ends).nonzero()
        length = int(ends[0]) + 1 if stop and len(ends) else len(tokens)
        return Answer(tokens[:length].tolist(), logp[:length])

    def text(self, tokens: Sequence[int]) -> str:
        """What ``tokens`` say, without the end-of-turn token."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _cache(self, pasts: Sequence[Active]) -> Any:
        """Transformers' cache of a batch of equally long pasts; of none, an empty one."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        shape = (len(pasts), -1, self.geometry.kv_heads, self.geometry.head_dim)
        for layer in range(self.geometry.layers if pasts else 0):
            stacks = (torch.stack([x[layer] for x in xs]) for xs in zip(*pasts, strict=True))
            cache.update(*(x.view(shape).transpose(1, 2) for x in stacks), layer)
        return cache

    def _forward(self, cache: Any, start: int, tokens: Sequence[int] | Tensor, keep: int, batch: int) -> Tensor:
        """fp32 logits ``[B, keep, V]`` of ``tokens [n]`` or ``[B, n]``, by which the cache of ``start`` grows."""
        given = tokens if isinstance(tokens, Tensor) else torch.tensor([list(tokens)]).expand(batch, -1)
        out = self.model(
            input_ids=given,
            position_ids=torch.arange(start, start + given.shape[1])[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = out.logits
        return logits.float()

    def release(self, active: Active, start: int) -> Caches:
        """Position-free cache of rows whose first stands at position ``start``."""
        cos, sin = self.rope.span(start, start + active.tokens)
        return Caches(torch.stack([release(self.rope, k, cos, sin) for k in active.k]), active.v)
