"""Run the engine's own model over token ranges of our choice, inside a step.

vLLM accepts one contiguous extension of a request, but the head of a run and the gap between two runs must be
computed over what stands in front of them. A nested forward does that: one virtual sequence a range, all over the
request's own block table, K and V written into the paged cache, output discarded. Every layer writes the K and V of
all ranges before any is read, so a later range sees an earlier one of the same batch.

vLLM's internals are touched here; `NestedForward` checks what it needs, and refuses by name what it was not built for.
"""

import contextvars
import copy
import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from lmcache_kvcmas.connectors.paged import PagedCache
from lmcache_kvcmas.errors import UnsupportedEngineError

_RUNNER_MODULES = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Share of the largest value; a range that read the wrong blocks is off by the whole of it."""

_current_runner: contextvars.ContextVar[Any] = contextvars.ContextVar("kvcmas_runner", default=None)


def expose_runner() -> None:
    """Make `current_runner` answer while a runner registers its caches with the connector.

    A connector is given caches, not the runner that owns the model. The worker builds its connector before its runner
    initialises the caches, so wrapping that method from the connector's constructor is early enough.
    """
    for name in _RUNNER_MODULES:
        cls = getattr(sys.modules.get(name), "GPUModelRunner", None)  # only what the worker really imported
        if cls is None or hasattr(cls.initialize_kv_cache, "__kvcmas__"):
            continue
        original = cls.initialize_kv_cache

        @functools.wraps(original)
        def initialize(self: Any, *args: Any, __original: Any = original, **kwargs: Any) -> Any:
            token = _current_runner.set(self)
            try:
                return __original(self, *args, **kwargs)
            finally:
                _current_runner.reset(token)

        initialize.__kvcmas__ = True  # type: ignore[attr-defined]
        cls.initialize_kv_cache = initialize


def current_runner() -> Any:
    """The runner that is initialising its caches right now, or None."""
    return _current_runner.get()


@dataclass(frozen=True, slots=True)
class Range:
    """Tokens at positions ``[start, start + len(tokens))`` of a request whose block table is ``block_ids``."""

    tokens: Sequence[int]
    start: int
    block_ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class NestedForward:
    """The model of one worker, callable over ranges. Raises `UnsupportedEngineError` when it was not built for it."""

    def __init__(self, runner: Any, config: VllmConfig) -> None:
        problems = _problems(runner, config)
        if problems:
            raise UnsupportedEngineError("heads and gaps cannot be computed inside this engine: " + ", ".join(problems))
        self._runner, self._config = runner, config
        self._device: torch.device = runner.device
        block_sizes = getattr(runner, "kernel_block_sizes", None) or runner._kernel_block_sizes
        self._kernel_block: int = block_sizes[0]
        self._block: int = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        # Metadata builders of our own: some backends keep persistent buffers in theirs, which the step that
        # surrounds us has filled already.
        self._groups = []
        for group in runner.attn_groups[0]:
            own = copy.copy(group)
            own.metadata_builders = []
            own.create_metadata_builders(config, self._device, self._kernel_block, 1)
            self._groups.append(own)
        self._max_tokens: int = config.scheduler_config.max_num_batched_tokens
        self._max_sequences: int = config.scheduler_config.max_num_seqs
        self.running = False
        """True inside a nested forward: per-layer hooks of the connector must do nothing then."""

    def run(self, ranges: Sequence[Range]) -> None:
        """Compute K and V of ``ranges`` in place. Ranges of one request must be in order of position.

        Split at the engine's token and sequence budgets; an earlier range never runs after a later one.
        """
        for batch in self._batches(ranges):
            self._forward(batch)

    def prove(self, paged: PagedCache, tokens: int = 48) -> None:
        """Compare ranges computed at once with the same ranges computed one after the other, in unused blocks.

        Long ranges and single tokens, together and apart: attention kernels differ for batches of single tokens.

        Raises:
            UnsupportedEngineError: they differ, or this engine's model does not run this way.
        """
        each = tokens // paged.block + 1
        blocks = range(paged.blocks - 3 * each, paged.blocks)
        ids = [(7 * i + 11) % 1000 for i in range(tokens)]
        cuts = [0, tokens // 3, tokens // 3 + 1, tokens - 3, tokens - 2, tokens - 1, tokens]
        together: list[Sequence[int]] = [cuts]
        in_two: list[Sequence[int]] = [cuts[:4], cuts[3:]]
        one_by_one: list[Sequence[int]] = list(pairwise(cuts))
        shape = (2, paged.layers, tokens, paged.channels)
        found = []
        try:
            for i, batches in enumerate((together, in_two, one_by_one)):
                mine = blocks[i * each : (i + 1) * each]
                for batch in batches:
                    self.run([Range(ids[a:b], a, mine) for a, b in pairwise(batch)])
                k, v = torch.empty(shape, dtype=paged.dtype, device=paged.device)
                paged.read(mine, 0, tokens, k, v)
                found.append(torch.stack([k, v]).float())
        except Exception as error:
            raise UnsupportedEngineError(f"the model does not run over chosen ranges: {error!r}") from error
        finally:
            paged.clear(blocks)
        worst = torch.stack([(other - found[-1]).abs().max() for other in found[:-1]]).max()
        if not worst <= _TOLERANCE[paged.dtype] * found[-1].abs().max():
            raise UnsupportedEngineError(f"ranges computed at once and one by one differ by {worst:.3g}")

    def _batches(self, ranges: Sequence[Range]) -> Iterator[list[Range]]:
        batch: list[Range] = []
        room = self._max_tokens
        for whole in ranges:
            at = 0
            while at < len(whole.tokens):
                if room == 0 or len(batch) == self._max_sequences:
                    yield batch
                    batch, room = [], self._max_tokens
                size = min(room, len(whole.tokens) - at)
                fits = size == len(whole.tokens)
                part = whole if fits else Range(whole.tokens[at : at + size], whole.start + at, whole.block_ids)
                batch.append(part)
                at += size
                room -= size
        if batch:
            yield batch

    @contextmanager
    def _muted(self) -> Iterator[None]:
        self.running = True
        try:
            yield
        finally:
            self.running = False

    @torch.inference_mode()
    def _forward(self, ranges: list[Range]) -> None:
        lengths = torch.tensor([len(r.tokens) for r in ranges], dtype=torch.int32)
        starts = torch.zeros(len(ranges) + 1, dtype=torch.int32)
        starts[1:] = lengths.cumsum(0)
        ends = torch.tensor([r.end for r in ranges], dtype=torch.int32)
        total = int(starts[-1])
        tables = self._block_tables(ranges)
        rows = torch.repeat_interleave(torch.arange(len(ranges)), lengths)
        positions = torch.arange(total) + (ends - starts[1:])[rows]
        size = self._kernel_block
        slots = (tables[rows, positions // size].long() * size + positions % size).to(self._device)
        positions = positions.to(self._device)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(self._device),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(ranges),
            num_actual_tokens=total,
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=tables.to(self._device),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=torch.ones(len(ranges), dtype=torch.bool),
        )
        metadata: dict[str, Any] = {}
        for group in self._groups:
            built = group.build_metadata(common)
            metadata |= dict.fromkeys(group.layer_names, built)
        tokens = torch.tensor([t for r in ranges for t in r.tokens], dtype=torch.int32).to(self._device)
        with (
            self._muted(),
            set_forward_context(
                metadata,
                self._config,
                num_tokens=total,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                slot_mapping=dict.fromkeys(metadata, slots),
            ),
        ):
            self._runner.model(input_ids=tokens, positions=positions, intermediate_tensors=None, inputs_embeds=None)

    def _block_tables(self, ranges: list[Range]) -> torch.Tensor:
        """Kernel blocks of each range's sequence, ``[ranges, blocks]`` int32; the manager's may be larger.

        A range may have more of its request's blocks than it reaches into: there are many ranges to a request.
        """
        per_block = self._block // self._kernel_block
        width = max(-(-r.end // self._block) for r in ranges)
        requests = {id(r.block_ids): r.block_ids for r in ranges}
        tables = torch.zeros(len(requests), width * per_block, dtype=torch.int32)
        for row, block_ids in zip(tables, requests.values(), strict=True):
            blocks = torch.as_tensor(block_ids[:width], dtype=torch.int32)
            blocks = (blocks[:, None] * per_block + torch.arange(per_block, dtype=torch.int32)).flatten()
            row[: len(blocks)] = blocks
        row_of = {name: i for i, name in enumerate(requests)}
        return tables[[row_of[id(r.block_ids)] for r in ranges]]


def _problems(runner: Any, config: VllmConfig) -> list[str]:
    """Why a nested forward cannot be trusted here, in words; empty when it can."""
    if runner is None:
        return ["the model runner was not found"]
    parallel, model = config.parallel_config, config.model_config
    refused = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism with a mixture of experts": parallel.data_parallel_size > 1
        and getattr(parallel, "is_moe_model", None) is not False,
        "context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "dual batch overlap": bool(getattr(parallel, "use_ubatching", False)),
        "LoRA": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
        "M-RoPE": bool(getattr(model, "uses_mrope", False)),
        "an encoder-decoder model": bool(getattr(model, "is_encoder_decoder", False)),
    }
    problems = [name for name, found in refused.items() if found]
    problems += [f"runner.{a} is missing" for a in ("model", "attn_groups", "device") if not hasattr(runner, a)]
    groups = runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        problems.append("cache groups other than one of full attention")
    wanted = {
        CommonAttentionMetadata: {"query_start_loc_cpu", "seq_lens_cpu_upper_bound", "block_table_tensor", "positions"},
        set_forward_context: {"num_tokens", "cudagraph_runtime_mode", "slot_mapping"},
    }
    for target, names in wanted.items():
        if missing := names - set(inspect.signature(target).parameters):
            problems.append(f"{target.__name__} lost {', '.join(sorted(missing))}")
    return problems
