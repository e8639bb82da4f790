"""Every method where its answer is known. A rival that is built wrongly would make ours look better than it is."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_partial import assert_same, damaged
from tiny_model import INSTRUCTIONS, LAYERS, LONG, LONGER, NEW, ROLES, SEEN, SHORT, TWIN, WORKLOAD
from typer.testing import CliRunner

from lmcache_kvcmas.connectors.cli import app
from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.evaluate.cases import Case, Examples, Outcome, answers_of, pool_of, rotated
from lmcache_kvcmas.evaluate.dense import Active
from lmcache_kvcmas.evaluate.methods import DEFAULT_METHODS, METHODS, Knobs, Method, Predicted, method_names
from lmcache_kvcmas.evaluate.methods.anchored import entropy_accepts
from lmcache_kvcmas.evaluate.methods.cacheblend import CacheBlend
from lmcache_kvcmas.evaluate.methods.dense import Dense
from lmcache_kvcmas.evaluate.methods.droidspeak import DroidSpeak
from lmcache_kvcmas.evaluate.methods.epic import Epic
from lmcache_kvcmas.evaluate.methods.gated import Gated
from lmcache_kvcmas.evaluate.methods.graphflow import GraphFlow
from lmcache_kvcmas.evaluate.methods.kamera import Kamera
from lmcache_kvcmas.evaluate.methods.kvcmas import KVCMAS
from lmcache_kvcmas.evaluate.methods.kvcomm import KVComm
from lmcache_kvcmas.evaluate.methods.relaycaching import RelayCaching
from lmcache_kvcmas.evaluate.run import EvaluateSettings, evaluate
from lmcache_kvcmas.evaluate.runs import DenseRuns
from lmcache_kvcmas.evaluate.workload import Context

WHOLE = 1 << 30
FULL = torch.float32


def examples_of(tiny: DenseRuns, *contexts: Context) -> Examples:
    return Examples(tuple(tiny.case("solver", "critic", c) for c in contexts))


@pytest.fixture
def examples(tiny: DenseRuns) -> Examples:
    return examples_of(tiny, TWIN, SHORT, LONG, LONGER)


@pytest.fixture
def case(tiny: DenseRuns) -> Case:
    """The text that one anchor has seen: 90 tokens."""
    return tiny.case("solver", "critic", SEEN)


def free(case: Case, run: Active) -> Case:
    """The same transition from a source whose cache is ``run``, at the destination's positions."""
    return replace(case, source=case.model.release(run, case.prefix.tokens), source_prefix=case.prefix)


@pytest.mark.parametrize(
    "method",
    [
        Dense(),
        Epic(k=256),
        CacheBlend(share=1.0),
        DroidSpeak(share=1.0),
        RelayCaching(deviating=1.0, end=LAYERS),
        RelayCaching(suffix=90, end=2),
        Kamera(rank=WHOLE, dtype=FULL),
        GraphFlow(drop_k=0, drop_v=0, dtype=FULL),
    ],
    ids=lambda m: m.name,
)
def test_with_everything_spent_every_method_is_dense(method: Method, examples: Examples, case: Case) -> None:
    method = method if isinstance(method, RelayCaching) else method.learned(examples)
    outcome = method.apply(case)
    assert_same(outcome.run, case.dense)
    assert outcome.recompute == (0 if isinstance(method, (Kamera, GraphFlow)) else 1)
    assert outcome.accepted


@pytest.mark.parametrize("method", [KVComm(dtype=FULL), KVCMAS(rank=WHOLE, dtype=FULL)], ids=lambda m: m.name)
def test_an_anchor_of_the_very_context_restores_it(method: KVComm | KVCMAS, tiny: DenseRuns, case: Case) -> None:
    """The other anchor is shorter, so this one alone speaks. Layer 0 comes from the base, which is exact."""
    taught = method.learned(examples_of(tiny, TWIN, SHORT))
    outcome = taught.apply(case)
    assert_same(outcome.run, case.dense)
    assert (outcome.recompute, outcome.accepted) == (0, True)
    assert outcome.reference_prefills == (1 if method.name == "kvcomm" else 0)
    channels, kept = 16, 4 if method.name == "kvcomm" else 2
    cache = 2 * LAYERS * 90 * channels
    assert outcome.state_bytes >= kept // 2 * 4 * cache
    new = taught.apply(tiny.case("solver", "critic", NEW))
    assert new.accepted
    assert (new.run.k - tiny.run("critic", NEW).k).abs().max() > 0.01


def test_kvcomm_starts_from_the_context_alone_and_kvcmas_from_the_source(tiny: DenseRuns, case: Case) -> None:
    """Where the anchors know nothing (their deltas are zero), what is left is the reference."""
    for method, role in ((KVComm(dtype=FULL), None), (KVCMAS(rank=WHOLE, dtype=FULL), "solver")):
        taught = method.learned(examples_of(tiny, TWIN, SHORT))
        assert taught.pool is not None
        anchors = [
            replace(a, delta_k=replace(a.delta_k, u=0 * a.delta_k.u), delta_v=replace(a.delta_v, u=0 * a.delta_v.u))
            for a in taught.pool.anchors
        ]
        taught.pool.replace(anchors)
        assert_same(taught.apply(case).run, rotated(replace(case, source=tiny.free(role, SEEN))), atol=1e-5)


def test_kvcmas_keeps_low_rank_and_whole_length(tiny: DenseRuns, examples: Examples, case: Case) -> None:
    """Rank 4 of 16 channels: fewer bytes, not exact, and no more than ten anchors."""
    low, whole = (KVCMAS(rank=r).learned(examples) for r in (4, WHOLE))
    assert low.pool is not None
    assert [a.tokens for a in low.pool.anchors] == [90, 40, 100, 110]
    assert low.apply(case).state_bytes < 0.6 * whole.apply(case).state_bytes
    twelve = tuple(replace(SHORT, id=str(i)) for i in range(12))
    many = examples_of(tiny, *twelve)
    pools = [method.learned(many).pool for method in (KVCMAS(), KVComm(capacity=11))]
    assert [len(p) for p in pools if p is not None] == [10, 11]


def test_the_entropy_gate(tiny: DenseRuns, case: Case) -> None:
    """By hand: p = softmax(−d) over the anchors that are long enough; more than γ·log2(n) bits is too much."""
    values = case.source.v
    pool = pool_of(examples_of(tiny, TWIN, LONG, LONGER, SHORT).cases, WHOLE, WHOLE, FULL)
    anchors = pool.anchors
    d = [float((values - tiny.free("solver", c).v[:, :90]).double().norm()) for c in (TWIN, LONG, LONGER)]
    p = [math.exp(-x) / sum(math.exp(-y) for y in d) for x in d]
    share = -sum(x * math.log2(x) for x in p if x) / math.log2(3)
    assert entropy_accepts(values, anchors, share + 1e-6)
    assert not entropy_accepts(values, anchors, share - 1e-6)
    assert not entropy_accepts(values, anchors[:1], 1.0)
    assert entropy_accepts(values, [anchors[0], anchors[3]], 0.0)
    assert not entropy_accepts(values, [anchors[0], anchors[0]], 0.99)


@pytest.mark.parametrize("method", [KVComm(), KVCMAS(), Gated("g", Predicted("a", "attention", 32), theta=-1.0)])
def test_what_a_gate_refuses_is_dense_and_costs_dense(
    method: KVComm | KVCMAS | Gated, tiny: DenseRuns, case: Case
) -> None:
    """Two anchors alike say nothing about which of them is right; no ê is below a θ of -1."""
    twins = examples_of(tiny, TWIN, replace(TWIN, id="b") if not isinstance(method, Gated) else LONG)
    outcome = method.learned(twins).apply(case)
    assert_same(outcome.run, case.dense, atol=0)
    assert (outcome.recompute, outcome.accepted) == (1, False)
    assert outcome.state_bytes > 0


def test_an_open_gate_changes_nothing(examples: Examples, case: Case) -> None:
    inner = Predicted("attention+head", "attention", 32)
    gated = Gated("g", inner, theta=1e9).learned(examples).apply(case)
    plain = inner.learned(examples).apply(case)
    assert_same(gated.run, plain.run, atol=0)
    assert gated[1:-1] == plain[1:-1]
    assert plain.recompute == 32 / 90
    assert plain.state_bytes == sum(a.nbytes for a in examples.pool.anchors)


def test_epic_recomputes_the_first_tokens_of_each_chunk(case: Case) -> None:
    outcome = Epic(k=8, chunk=30).apply(case)
    assert outcome.recompute == 24 / 90
    changed = (outcome.run.k[-1] - rotated(case).k[-1]).abs().amax(1) > 1e-4
    assert set(changed.nonzero().flatten().tolist()) == {c + i for c in (0, 30, 60) for i in range(8)}
    assert_same(outcome.run.rows(0, 8), case.dense.rows(0, 8))


def test_cacheblend_finds_the_tokens_that_deviate(case: Case) -> None:
    """A cache that is wrong in five scattered tokens is dense again: these are picked, and nothing else is needed."""
    rows = torch.tensor([2, 17, 40, 41, 88])
    outcome = CacheBlend(share=0.1).apply(free(case, damaged(case.dense, rows)))
    assert_same(outcome.run, case.dense)
    assert CacheBlend(share=0.1).counts(LAYERS, 90) == [90, 90, 11, 8]
    assert outcome.recompute == (90 + 90 + 11 + 8) / 360


def test_cacheblend_takes_fewer_from_layer_to_layer() -> None:
    counts = CacheBlend().counts(30, 1000)
    assert counts[:2] == [1000, 1000]
    assert counts[2:] == sorted(counts[2:], reverse=True)
    assert sum(counts[2:]) / 28 == pytest.approx(150, abs=1)
    assert counts[2] > 150 > counts[-1]


def test_droidspeak_recomputes_one_group_from_the_sources_hidden_states(case: Case) -> None:
    wrong = damaged(case.dense, torch.arange(90))
    mixed = Active(*(torch.cat([d[:1], w[1:3], d[3:]]) for d, w in zip(case.dense, wrong, strict=True)))
    outcome = DroidSpeak(share=0.5, first=1).apply(free(case, mixed))
    assert_same(outcome.run, case.dense)
    assert outcome.recompute == 0.5
    assert outcome.state_bytes == 2 * 90 * 32
    assert DroidSpeak(share=0.5, first=0).apply(case).state_bytes == 0
    with pytest.raises(ValueError, match="hidden states"):
        DroidSpeak(first=1).apply(replace(case, source_prefix=None))


def test_droidspeak_chooses_the_group_that_serves_the_anchors_best(examples: Examples) -> None:
    chosen = DroidSpeak(share=0.5).learned(examples)
    assert isinstance(chosen, DroidSpeak)
    kls = []
    for first in range(3):
        said = [answers_of(c, [DroidSpeak(share=0.5, first=first).apply(c)])[0].kl for c in examples.cases[:3]]
        kls.append(sum(said))
    assert chosen.first == min(range(3), key=kls.__getitem__)


def test_relaycaching_repairs_tokens_up_to_its_range_and_the_suffix_everywhere(case: Case) -> None:
    rows = torch.tensor([4, 33, 34])
    outcome = RelayCaching(suffix=5, end=3).apply(free(case, damaged(case.dense, rows)))
    assert_same(Active(*(x[:3] for x in outcome.run)), Active(*(x[:3] for x in case.dense)))
    assert (outcome.run.k[3, rows] - case.dense.k[3, rows]).abs().max() > 0.1
    # 9 tokens deviate most, 5 matter most, 5 are the suffix; those may be among the others.
    assert 90 + 90 + 14 + 5 <= round(outcome.recompute * 360) <= 90 + 90 + 19 + 5
    suffix = RelayCaching(deviating=0, influential=0, suffix=90, end=2).apply(case)
    assert_same(suffix.run, case.dense)


def test_relaycaching_learns_where_layers_deviate(examples: Examples) -> None:
    """Layer 0 never does, so its range cannot be the first two of four."""
    taught = RelayCaching().learned(examples)
    assert taught.end in (3, 4)


def test_graphflow_keeps_the_largest_quarter(case: Case) -> None:
    outcome = GraphFlow().apply(case)
    base = rotated(replace(case, source=case.alone()))
    delta = (outcome.run.v - base.v)[1:]
    kept = (delta.abs() > 1e-6).float().mean()
    assert float(kept) == pytest.approx(0.30, abs=0.01)
    numbers, positions = (LAYERS - 1) * 90 * 16, 2 * (LAYERS - 1) * 90 * 16 // 8
    cache = 2 * 2 * LAYERS * 90 * 16
    assert outcome.state_bytes == pytest.approx(cache + positions + 2 * numbers * (0.25 + 0.30), rel=0.01)
    assert (outcome.recompute, outcome.reference_prefills) == (0, 2)
    smallest_kept = delta.abs()[delta.abs() > 1e-6].min()
    left = (case.dense.v - outcome.run.v)[1:][delta.abs() <= 1e-6].abs().max()
    assert left <= 1.01 * max(smallest_kept, (delta.abs() * (delta.abs() > 1e-6)).max())
    assert (case.dense.v - outcome.run.v).norm() < 0.6 * (case.dense.v - base.v).norm()


def test_kamera_is_nearer_the_higher_its_rank(case: Case) -> None:
    errors = [float((Kamera(rank=r).apply(case).run.v - case.dense.v).norm()) for r in (1, 4, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < float((rotated(replace(case, source=case.alone())).v - case.dense.v).norm())
    outcome = Kamera(rank=4).apply(case)
    assert outcome.state_bytes == 2 * 2 * LAYERS * 90 * 16 + 2 * 2 * (LAYERS - 1) * 4 * (90 + 16)


def test_none_recomputes_and_keeps_nothing(examples: Examples, case: Case) -> None:
    outcome = METHODS["none"](Knobs()).learned(examples).apply(case)
    assert_same(outcome.run, rotated(case), atol=0)
    assert outcome[:-1] == Outcome(outcome.run)[:-1]
    assert outcome.computed is not None
    assert not len(outcome.computed)


@pytest.mark.parametrize("method", [KVComm(), KVCMAS(), DroidSpeak(), RelayCaching()], ids=lambda m: m.name)
def test_what_must_learn_says_so(method: Method, case: Case) -> None:
    with pytest.raises(RuntimeError, match="anchor contexts first"):
        method.apply(case)


def test_names() -> None:
    assert method_names([]) == DEFAULT_METHODS
    assert method_names(["all"]) == tuple(METHODS)
    assert method_names(["epic", "none", "epic"]) == ("none", "epic")
    with pytest.raises(ConfigError, match="'epik' is not a method"):
        method_names(["epik"])


def test_every_method_runs_on_contexts_of_all_lengths(tiny: DenseRuns) -> None:
    """One token, a run shorter than the suffix, one longer than all anchors; figures are figures."""
    contexts = tuple(Context(f"n{n}", False, " ".join(["w5"] * n)) for n in (1, 7, 130))
    runs = DenseRuns(tiny.model, replace(WORKLOAD, contexts=(*WORKLOAD.anchors, *contexts)))
    rows = evaluate(runs, EvaluateSettings((("solver", "critic"),), anchors=3, methods=tuple(METHODS)))
    assert len(rows) == 3 * len(METHODS)
    for row in rows:
        assert all(math.isfinite(x) for x in (row.kl, row.kv_error, row.res_k, row.res_v, row.recompute))
        assert 0 <= row.recompute <= 1
        assert row.state_bytes >= 0


def files(folder: Path) -> list[str]:
    contexts, roles = folder / "contexts.jsonl", folder / "roles.json"
    lines = [{"id": c.id, "use": "anchor" if c.anchor else "dev", "text": c.text} for c in WORKLOAD.contexts]
    contexts.write_text("\n".join(map(json.dumps, lines)))
    roles.write_text(json.dumps({"roles": ROLES, "instructions": INSTRUCTIONS}))
    return ["--roles", str(roles), "--contexts", str(contexts), "--edge", "solver:critic", "--anchors", "4"]


def test_the_file_of_all_methods(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--model", str(tiny_folder), *files(tmp_path), "--methods", "all", "--json", str(out)]
    result = CliRunner().invoke(app, ["evaluate", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert list(written["summary"]) == list(METHODS) == written["settings"]["methods"]
    for name, summary in written["summary"].items():
        assert summary["accuracy"] is None
        assert 0 <= summary["accepted"] <= 1
        rows = [r for r in written["rows"] if r["method"] == name]
        assert len(rows) == 2
        assert summary["recompute"] == pytest.approx(sum(r["recompute"] for r in rows) / 2)
        assert summary["state_bytes"] == pytest.approx(sum(r["state_bytes"] for r in rows) / 2)
        for row in rows:
            assert row["gate"] in ("accepted", "dense")
            assert row["reference_prefills"] in (0, 1, 2)
            if row["gate"] == "dense":
                assert (row["kl"], row["recompute"]) == (pytest.approx(0, abs=1e-5), 1)
    assert written["summary"]["dense"]["kl"] == pytest.approx(0, abs=1e-5)
    assert written["summary"]["dense"]["recompute"] == 1
    assert all(word in result.output for word in ("relaycaching", "recomp.", "passed"))


def test_some_methods_and_a_wrong_one(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["evaluate", "--model", str(tiny_folder), *files(tmp_path), "--json", str(out), "--methods"]
    assert CliRunner().invoke(app, [*options, "epic, kamera"]).exit_code == 0
    assert list(json.loads(out.read_text())["summary"]) == ["none", "epic", "kamera"]
    wrong = CliRunner().invoke(app, [*options, "epic,kvcom"], env={"COLUMNS": "200"})
    assert wrong.exit_code == 2
    assert "'kvcom' is not a method" in wrong.output
