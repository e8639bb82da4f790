"""``KVCMASConnector``: what vLLM loads. Translates vLLM's calls to the two halves; the work is done there.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVCMASConnector",
    "kv_connector_module_path": "lmcache_kvcmas.connectors.vllm", "kv_role": "kv_both"}'
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from lmcache_kvcmas.connectors.engine import check_rope, describe
from lmcache_kvcmas.connectors.journal import Journal
from lmcache_kvcmas.connectors.lmcache_config import load_lmcache_config
from lmcache_kvcmas.connectors.lmcache_open import StoreShape, open_store
from lmcache_kvcmas.connectors.messages import Handshake, StepWork, WorkerReport
from lmcache_kvcmas.connectors.metrics import KVCMASPromMetrics, KVCMASStats
from lmcache_kvcmas.connectors.neighbours import Neighbours
from lmcache_kvcmas.connectors.nested import NestedForward, current_runner, expose_runner
from lmcache_kvcmas.connectors.paged import PagedCache
from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_names import Names
from lmcache_kvcmas.connectors.scheduler_side import SchedulerSide
from lmcache_kvcmas.connectors.worker_side import WorkerSide
from lmcache_kvcmas.entries import Owner
from lmcache_kvcmas.errors import UnsupportedEngineError

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = init_logger("vllm.kvcmas")

_START_SECONDS = 5.0  # for what other nodes left before this engine started


class KVCMASConnector(KVConnectorBase_V1):
    """Agents take over one another's KV cache. See ``docs/architecture.md`` for the path of a request.

    Raises:
        ConfigError: the LMCache file has a setting of ours that is unknown or impossible.
        UnsupportedEngineError, UnsupportedModelError: this engine or model is not one that corrections work in.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._lmcache = load_lmcache_config()
        self.geometry = describe(vllm_config, kv_cache_config)
        self._block: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._node = str(self._kv_transfer_config.engine_id)
        self._journal: Journal | None = None
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        if role is KVConnectorRole.WORKER:
            expose_runner()
            return
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            # A miss, or a prediction that the gate refuses, must cost time, never a request.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            logger.info("kvcmas sets kv_load_failure_policy to recompute: what cannot be given is prefilled")
        settings = self._lmcache.settings
        fingerprint, redis = self.geometry.fingerprint, self._lmcache.redis
        neighbours = None
        if redis is not None:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            # Rank 0's names: the journal is one for all ranks, and records have none.
            names = Names(redis.prefix, Owner(fingerprint, 0, ranks), settings.salt)
            journal = Journal(RedisClient(redis), names, self._node, settings.max_records)
            neighbours = Neighbours(journal, ranks, redis.timeout_ms / 1000)
        self.scheduler = SchedulerSide(settings, self._lmcache.chunk_size, fingerprint, self._block, neighbours)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost capture is a later miss: no request has to wait for one."""
        return False

    # workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        geometry, config = self.geometry, self._vllm_config
        if len(kv_caches) != geometry.layers:
            raise UnsupportedEngineError(f"the engine has {len(kv_caches)} caches for {geometry.layers} layers")
        layers = config.compilation_config.static_forward_context
        paged = PagedCache(kv_caches, layers, self._block, geometry.kv_heads, geometry.head_dim)
        rope = geometry.rope.table(paged.device)
        rope.reserve(config.model_config.max_model_len)
        runner = current_runner()
        if runner is not None:
            check_rope(runner.model, rope)
        group = get_tp_group()
        owner = Owner(geometry.fingerprint, group.rank_in_group, group.world_size)
        shape = StoreShape(
            geometry.layers, geometry.kv_heads, geometry.head_dim, paged.dtype, group.local_rank, group.world_size
        )
        store = open_store(self._lmcache, owner, shape, self._node)
        self.worker = WorkerSide(self._lmcache.settings, geometry, store, paged, rope)
        redis = self._lmcache.redis
        if redis is not None:
            names = Names(redis.prefix, owner, self._lmcache.settings.salt)
            self._journal = Journal(
                RedisClient(redis),
                names,
                self._node,
                self._lmcache.settings.max_records,
                records=False,
                told=self.worker.hear,
            )
        if self._lmcache.settings.nested:
            try:
                self.worker.use_nested(NestedForward(runner, config))
            except UnsupportedEngineError as error:
                logger.warning("kvcmas goes on without heads, and gaps end the reuse: %s", error)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Handshake(nested=self.worker is not None and self.worker.nested is not None)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork)
        assert self.worker is not None
        self.worker.step(work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done before the forward begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole requests are captured when they finish."""

    def wait_for_save(self) -> None:
        """Captures are done when `start_load_kv` returns."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self.worker is not None
        return self.worker.take_saved() or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.worker is not None
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self.worker is not None
        return self.worker.take_report()

    def shutdown(self) -> None:
        if self._journal is not None:
            self._journal.close()
        if self.worker is not None:
            self.worker.close()
        if self.scheduler is not None:
            self.scheduler.close()

    # scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        assert self.scheduler is not None
        told = [m.nested for m in metadata.values() if isinstance(m, Handshake)]
        self.scheduler.set_nested(bool(told) and all(told))
        self.scheduler.catch_up(_START_SECONDS)

    def on_new_request(self, request: "Request") -> None:
        assert self.scheduler is not None
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        return self.scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self.scheduler is not None
        return self.scheduler.take_work()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self.scheduler is not None
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self.scheduler.reported(report)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        return self.scheduler.finished(request, block_ids)

    def reset_cache(self) -> bool:
        assert self.scheduler is not None
        self.scheduler.forget()
        return True

    # metrics

    def get_kv_connector_stats(self) -> KVCMASStats | None:
        if self.scheduler is None:
            return None
        counts = self.scheduler.take_counts()
        return KVCMASStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVCMASStats:
        return KVCMASStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVCMASPromMetrics:
        return KVCMASPromMetrics(*args)
