"""What several ranks report together, and what is counted: a rank's failure is everybody's, and sums are sums."""

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from lmcache_kvcmas.connectors.messages import Judged, Outcome, Prefetched, WorkerReport
from lmcache_kvcmas.connectors.metrics import KVCMASStats
from lmcache_kvcmas.connectors.vllm import KVCMASConnector
from lmcache_kvcmas.spans import Edge

EDGE = Edge("a", "b", 0)
JUDGED = (Judged(10, 90, EDGE, 0.03, 4, True, "accepted"),)


def test_what_one_rank_could_not_give_the_request_does_not_have() -> None:
    fine = WorkerReport({"r": Outcome(JUDGED), "only here": Outcome()}, {("t", EDGE): 3}, {b"x"}, {}, {0: {"loads": 1}})
    failed = WorkerReport(
        {"r": Outcome(JUDGED, 40, "missing_entry")}, {("t", EDGE): 2}, {b"y"}, {}, {1: {"loads": 1, "saves": 2}}
    )
    for report in (fine.aggregate(failed), failed.aggregate(fine)):
        assert report.outcomes["r"] == Outcome(JUDGED, 40, "missing_entry")
        assert report.outcomes["only here"] == Outcome()
        assert report.anchors == {("t", EDGE): 2}, "ready when it is ready on all ranks"
        assert report.lost == {b"x", b"y"}
        assert report.counts == {0: {"loads": 1}, 1: {"loads": 1, "saves": 2}}, "added up by whoever knows all ranks"


def test_a_prefetch_is_done_when_all_ranks_have_spoken() -> None:
    """Ranks may speak in different steps, and what one of them could not get, the request does not have."""
    one = WorkerReport(prefetched={"r": Prefetched(gone=frozenset({b"x"}))})
    two = WorkerReport(prefetched={"r": Prefetched(unreachable=frozenset({b"y"})), "other": Prefetched()})
    together = one.aggregate(two).prefetched
    assert together == {"r": Prefetched(frozenset({b"x"}), frozenset({b"y"}), ranks=2), "other": Prefetched()}


def test_the_earliest_failure_counts() -> None:
    worse = Outcome(JUDGED, 20, "load_failed")
    assert Outcome(JUDGED, 40, "missing_entry").joined(worse).failed_from == 20
    assert worse.joined(Outcome(JUDGED, 40, "missing_entry")).cause == "load_failed"


def test_stats_add_up_and_name_the_reuse_rate() -> None:
    one = KVCMASStats({"tokens.shared": 100, "tokens.reused": 60, "gate.accepted": 1})
    both = one.aggregate(KVCMASStats({"tokens.shared": 100, "tokens.reused": 100}))
    assert both.data == {"tokens.shared": 200, "tokens.reused": 160, "gate.accepted": 1}
    assert both.reduce() == {"kvcmas_reused_tokens": 160, "kvcmas_shared_tokens": 200, "reuse_rate": 0.8}
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_prometheus_gets_tokens_and_events() -> None:
    class Config:
        kv_transfer_config = None

    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    metrics = KVCMASConnector.build_prom_metrics(Config(), types, ["engine"], {0: ["0"]})
    metrics.observe({"tokens.reused": 7, "gate.unreliable": 2})
    metrics.observe({"tokens.reused": 3})
    assert REGISTRY.get_sample_value("vllm:kvcmas_tokens_total", {"engine": "0", "kind": "reused"}) == 10
    assert REGISTRY.get_sample_value("vllm:kvcmas_events_total", {"engine": "0", "kind": "gate.unreliable"}) == 2
