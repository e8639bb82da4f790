"""One evaluation on real weights, shared by all tests that look at it."""

from pathlib import Path

import pytest
from measured_rows import EDGES, Measured
from tiny_model import WORKLOAD as TINY_WORKLOAD
from tiny_model import write_tiny_model

from lmcache_kvcmas.evaluate.chain import ChainRow, evaluate_chain
from lmcache_kvcmas.evaluate.dense import DenseModel
from lmcache_kvcmas.evaluate.methods import METHODS
from lmcache_kvcmas.evaluate.run import EvaluateSettings, evaluate
from lmcache_kvcmas.evaluate.runs import DenseRuns
from lmcache_kvcmas.evaluate.workload import load_workload

WORKLOAD = Path(__file__).parents[2] / "examples" / "workload"
OWN = Path(__file__).parents[2] / "lmcache_kvcmas" / "evaluate" / "data"


@pytest.fixture(scope="session")
def runs(model: Path) -> DenseRuns:
    return DenseRuns(DenseModel(model), load_workload(WORKLOAD / "roles.json", WORKLOAD / "contexts.jsonl"))


@pytest.fixture(scope="session")
def measured(runs: DenseRuns) -> Measured:
    """Every method on three edges, the first 10 anchors, the 10 test contexts."""
    return Measured(evaluate(runs, EvaluateSettings(EDGES, anchors=10, methods=tuple(METHODS))))


@pytest.fixture(scope="session")
def chain(runs: DenseRuns, measured: Measured) -> list[ChainRow]:
    """planner → solver → critic → reflector, on the same contexts (dense caches are there already)."""
    return evaluate_chain(runs, ["planner", "solver", "critic", "reflector"], anchors=10)


@pytest.fixture(scope="session")
def long_chain(runs: DenseRuns) -> list[ChainRow]:
    """Eight agents, three rounds: 23 hops over one context, on the three shortest."""
    own = load_workload(OWN / "roles.json", WORKLOAD / "contexts.jsonl")
    eight = DenseRuns(runs.model, own)
    shortest = sorted(own.tests, key=lambda c: len(c.text))[:3]
    return evaluate_chain(eight, [*own.roles] * 3, anchors=6, contexts=shortest, modes=("uncorrected", "gated"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> DenseRuns:
    """Dense runs of a model that takes milliseconds."""
    return DenseRuns(DenseModel(tiny_folder), TINY_WORKLOAD)
