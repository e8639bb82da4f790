"""What happened, in counts, for vLLM's log lines and its Prometheus endpoint (``vllm:kvcmas_tokens``, ``…_events``)."""

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

TOKENS = "tokens."
"""Prefix of counts of tokens; all others count events."""


class KVCMASStats(KVConnectorStats):
    """Counts since the last time they were asked for, by name."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> "KVCMASStats":
        return KVCMASStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """Tokens by origin and the share of shared tokens that was reused, for the log."""
        tokens = {name.removeprefix(TOKENS): n for name, n in self.data.items() if name.startswith(TOKENS)}
        shared = tokens.get("shared", 0)
        rate = {"reuse_rate": round(tokens.get("reused", 0) / shared, 3)} if shared else {}
        return {f"kvcmas_{name}_tokens": n for name, n in sorted(tokens.items())} | rate

    def is_empty(self) -> bool:
        return not self.data


class KVCMASPromMetrics(KVConnectorPromMetrics):
    """Two counters: tokens by origin, and events by name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        labels = [*self._labelnames, "kind"]
        self._tokens = self._counter_cls(
            name="vllm:kvcmas_tokens", documentation="Prompt tokens by where their cache came from.", labelnames=labels
        )
        self._events = self._counter_cls(
            name="vllm:kvcmas_events", documentation="Gate decisions, misses, captures, lessons.", labelnames=labels
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            counter, kind = (
                (self._tokens, name.removeprefix(TOKENS)) if name.startswith(TOKENS) else (self._events, name)
            )
            counter.labels(*engine, kind).inc(count)
