"""vLLM engines in this process, with and without the connector, for the demo, the benchmark and the tests."""

import gc
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import yaml
from teacher import Lesson, Teacher
from torch import Tensor

CONNECTOR = {
    "kv_connector": "KVCMASConnector",
    "kv_connector_module_path": "lmcache_kvcmas.connectors.vllm",
    "kv_role": "kv_both",
}


@dataclass(frozen=True)
class Answer:
    """What an engine made of one prompt."""

    tokens: list[int]
    text: str
    seconds: float
    """From the prompt to all tokens; the time to first token where one was asked for."""
    logits: Tensor
    """``[tokens, V]`` fp32, in front of each token."""
    cached_tokens: int
    """That vLLM did not prefill: from its own prefix cache and from the connector."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The connector's, see ``lmcache_kvcmas.report``; empty without one."""


class Engine:
    """One engine. ``connector`` is its half in this process' worker; None without one, or with workers elsewhere."""

    def __init__(self, llm: Any, connector: Any) -> None:
        self.llm, self.connector = llm, connector

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        forced: Sequence[int] = (),
        hints: Mapping[str, Any] | None = None,
        salt: str | None = None,
        **params: Any,
    ) -> Answer:
        """Answer one prompt greedily; say ``forced`` first."""
        return self.ask_all([prompt], max_tokens, [forced], hints, salt, **params)[0]

    def ask_all(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 1,
        forced: Sequence[Sequence[int]] | None = None,
        hints: Mapping[str, Any] | None = None,
        salt: str | None = None,
        **params: Any,
    ) -> list[Answer]:
        """Answer prompts in one batch."""
        from vllm import SamplingParams

        lessons = [Lesson(f) for f in (forced or [()] * len(prompts))]
        extra = {} if hints is None else {"kv_transfer_params": {"kvcmas": dict(hints)}}
        sampling = [
            SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra | {"lesson": x.name}, **params
            )
            for x in lessons
        ]
        requests = [{"prompt_token_ids": list(p)} | ({} if salt is None else {"cache_salt": salt}) for p in prompts]
        begun = time.perf_counter()
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return [
            Answer(
                list(o.outputs[0].token_ids),
                o.outputs[0].text,
                seconds,
                x.logits,
                o.num_cached_tokens or 0,
                (o.kv_transfer_params or {}).get("kvcmas", {}),
            )
            for o, x in zip(outputs, lessons, strict=True)
        ]

    def settle(self) -> None:
        """Let captures and lessons of finished requests be done, and the scheduler know of them.

        An engine in this process only steps while it is asked something: what a server does by itself is done here.
        """
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            core.step()
        if self.connector is not None:
            self.connector.worker.learner.drain()
            self.ask([0, 0], hints={"capture": False})

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    @property
    def store_bytes(self) -> int:
        """Memory that entries take in LMCache's CPU tier."""
        return self.connector.worker.store.stats().bytes_used

    @property
    def scheduler(self) -> Any:
        """The connector's half in the scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler


@contextmanager
def engine(
    model: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    connector: bool = True,
    lmcache: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Engine]:
    """Start an engine and end it.

    Args:
        settings: Ours, without the ``kvcmas.``; goes into the LMCache file.
        lmcache: LMCache's own settings, over a CPU tier of 1 GiB.
        extra: What else goes under its ``extra_config``.
        options: vLLM's.
    """
    from vllm import LLM
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lmcache.yaml"
        ours = {f"kvcmas.{name}": value for name, value in (settings or {}).items()} | dict(extra or {})
        content = {"chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 1.0, "extra_config": ours}
        file.write_text(yaml.safe_dump(content | dict(lmcache or {})))
        os.environ["LMCACHE_CONFIG_FILE"] = str(file)
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "seed": 0,
            "disable_log_stats": True,
            "async_scheduling": False,
            "logits_processors": [Teacher],
        }
        if connector:
            defaults["kv_transfer_config"] = CONNECTOR
        llm = LLM(str(model), **(defaults | options))
        try:
            yield Engine(llm, get_kv_transfer_group() if connector and has_kv_transfer_group() else None)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
