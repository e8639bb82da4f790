"""A vLLM engine in this process, with the connector: for tools that run agents or prove that they could.

One rank: what a tensor-parallel server reads has to be written by one of the same size.
"""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "HF_HUB_OFFLINE": "1",
}
_CPU_KVCACHE_GIB = "2"
_LOSSES = ("dropped", "failed", "no_room", "unpublished", "unjoined")

CONNECTOR = {
    "kv_connector": "KVCMASConnector",
    "kv_connector_module_path": "lmcache_kvcmas.connectors.vllm",
    "kv_role": "kv_both",
}


class Said(NamedTuple):
    tokens: list[int]
    text: str
    agent: str | None
    """As the connector names who was asked."""
    reused_tokens: int


class WarmEngine:
    """Answers prompts one by one; ``connector`` is the in-process connector's worker instance."""

    def __init__(self, llm: Any, connector: Any) -> None:
        self.llm, self.connector = llm, connector

    @property
    def tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    @property
    def fingerprint(self) -> str:
        return str(self.connector.geometry.fingerprint)

    def ask(self, prompt: Sequence[int], max_tokens: int, hints: dict[str, Any], salt: str = "") -> Said:
        """The greedy answer."""
        from vllm import SamplingParams

        request: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if salt:
            request["cache_salt"] = salt
        extra = {"kv_transfer_params": {"kvcmas": hints}}
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=extra)
        [output] = self.llm.generate([request], [sampling], use_tqdm=False)
        report = (output.kv_transfer_params or {}).get("kvcmas", {})
        [answer] = output.outputs
        return Said(list(answer.token_ids), answer.text, report.get("agent"), report.get("reused_tokens", 0))

    def settle(self, timeout: float) -> bool:
        """Wait until what finished requests left is captured, learned, written and published; False if it is not.

        An engine in this process only steps while it is asked something: what a server does by itself is done here.
        """
        until = time.monotonic() + timeout
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests() and time.monotonic() < until:
            core.step()
        worker = self.connector.worker
        drained = worker.learner.drain(max(0.0, until - time.monotonic()))
        return bool(drained and worker.store.flush(max(0.0, until - time.monotonic())))

    @property
    def lost_writes(self) -> int:
        """Of the shared tier and the learner, since the start: what was dropped or failed."""
        counts = [*self.connector.worker.store.shared.counts.items(), *self.connector.worker.learner.counts.items()]
        return sum(n for name, n in counts if name.startswith(_LOSSES))


@contextmanager
def warm_engine(model: Path, file: Path | None, dtype: str, max_model_len: int | None) -> Iterator[WarmEngine]:
    """Starts an engine and ends it. Whatever keeps it from starting is raised as it is."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_KVCACHE_GIB)
    if file is not None:
        os.environ["LMCACHE_CONFIG_FILE"] = str(file)
    from vllm import LLM
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    options: dict[str, Any] = {} if max_model_len is None else {"max_model_len": max_model_len}
    llm: Any = LLM(
        str(model),
        dtype=dtype,
        enforce_eager=True,  # prompts are prefilled, hardly anything is decoded
        seed=0,
        disable_log_stats=True,
        async_scheduling=False,
        kv_transfer_config=CONNECTOR,
        **options,
    )
    try:
        yield WarmEngine(llm, get_kv_transfer_group())
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
