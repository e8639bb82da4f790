"""`kvcmas report`: the page says what the documents say, whatever names users gave."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_documents import METHODS, MODEL, ablated, calibrated, evaluated, summary, whole, written

from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.evaluate.chain import evaluate_chain
from lmcache_kvcmas.evaluate.document import document
from lmcache_kvcmas.evaluate.page import run_report
from lmcache_kvcmas.evaluate.ranks import effective_ranks
from lmcache_kvcmas.evaluate.run import EvaluateSettings, evaluate
from lmcache_kvcmas.evaluate.runs import DenseRuns

HOSTILE = '<script>alert("1")</script></svg>&amp;$\\frac{--> #0a59a8;'


class Page(HTMLParser):
    """Tables by caption, ids, tags, and all text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, dict[str, list[str]]] = {}
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self._rows: dict[str, list[str]] = {}
        self._inside = ""
        self._head = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag == "caption" or (tag, given.get("scope")) == ("th", "row"):
            self._inside, self._head = tag, ""
        if tag == "data":
            self._rows.setdefault(self._head, []).append(str(given["value"]))

    def handle_endtag(self, tag: str) -> None:
        if tag == "caption":
            self._rows = self.tables.setdefault(self._head, {})
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._inside:
            self._head += data


def report(folder: Path, *documents: dict[str, Any]) -> str:
    run_report(written(folder, *documents), folder / "report.html", None)
    return (folder / "report.html").read_text("utf-8")


SECTIONS = {
    "methods": ("summary", "edges", "workloads"),
    "tradeoff": ("summary", "edges", "workloads"),
    "memory": ("summary", "edges", "workloads"),
    "accuracy": ("workloads",),
    "hops": ("chain", "workloads"),
    "ranks": ("ranks",),
    "calibration": ("calibration",),
    "ablations": ("ablations",),
    "rows": ("rows",),
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a document that has everything."""
    return report(tmp_path_factory.mktemp("whole"), whole())


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_is_there_when_its_figures_are(section: str, page: str, tmp_path: Path) -> None:
    assert section in Page(page).ids
    less = {key: value for key, value in whole().items() if key not in SECTIONS[section]}
    ids = Page(report(tmp_path, less)).ids
    assert section not in ids
    assert {"short", "run"} <= set(ids)


def test_every_number_of_a_summary_can_be_read(page: str) -> None:
    tables = Page(page).tables
    captions = {"All 2 edges": whole()["summary"], "Workload quiz": whole()["workloads"]["quiz"]["summary"]}
    for edge, summaries in whole()["edges"].items():
        captions[f"Edge {edge.replace(':', ' → ')}"] = summaries
    for caption, summaries in captions.items():
        shown = tables[f"{caption}: every figure"]
        assert shown.keys() == METHODS.keys()
        for method, figures in summaries.items():
            known = [v if isinstance(v, list) else [v] for v in figures.values() if v is not None]
            assert sorted(shown[method]) == sorted(" ".join(repr(float(v)) for v in values) for values in known)


def test_the_other_tables_are_the_documents(page: str) -> None:
    tables = Page(page).tables
    assert tables["Edge planner → solver: every rank"]["0"] == ["4.5", "8.5", "30.0", "50.0"]
    assert tables["The curve: every figure"]["0.04"] == ["0.75", "0.0025", "0.25", "0.75", "0.0028"]
    assert tables["The curve: every figure"]["held out"] == ["0.7", "0.00275", "0.001 0.0045", "0.25", "0.7"]
    assert tables["Ablation of rank: every figure"]["8"] == ["0.25", "0.125 0.5", "0.15", "1000.0"]
    assert tables["Chain of agents: every figure, hop by hop"]["chained"][:3] == ["1", "0.002", "0.001 0.005"]
    assert len(tables[f"All {len(whole()['rows'])} rows"]) == len(METHODS)


def test_several_files_are_one_report(page: str, tmp_path: Path) -> None:
    parts, one = Page(report(tmp_path, evaluated(), calibrated(), ablated())), Page(page)
    assert parts.tables == one.tables
    assert set(one.ids) <= set(parts.ids)


def test_files_with_other_methods_and_the_same_figures_fit(tmp_path: Path) -> None:
    """Two runs on the same edge: the times differ, the rest of `none` does not."""
    first, second = ({"model": MODEL, "edges": {"a:b": {"none": summary("none")}}} for _ in range(2))
    second["edges"]["a:b"]["none"]["seconds"] = 99.0
    second["edges"]["a:b"]["rival"] = summary("rival")
    second["model"] = "/elsewhere/Synthetic-1M"
    assert Page(report(tmp_path, first, second)).tables["Edge a → b: every figure"].keys() == {"none", "rival"}


def test_edges_of_several_files_have_no_common_mean(tmp_path: Path) -> None:
    documents = [
        {"model": MODEL, "summary": {"none": summary("none", f)}, "edges": {edge: {"none": summary("none", f)}}}
        for edge, f in (("a:b", 1.0), ("b:c", 2.0))
    ]
    page = Page(report(tmp_path, *documents))
    assert "The files cover different edges" in page.text
    assert {"Edge a → b: every figure", "Edge b → c: every figure"} == page.tables.keys()


def test_what_was_calibrated_on_is_a_workload_of_its_own(tmp_path: Path) -> None:
    """`calibrate` serves traces of the same name with other pools: neither a contradiction, nor the same figures."""
    quiz = {"traces": 5, "summary": {"none": summary("none", 3.0), "rival": summary("rival", 3.0)}}
    page = Page(report(tmp_path, evaluated(), calibrated() | {"workloads": {"quiz": quiz}}))
    assert page.tables["Workload quiz, 1: every figure"].keys() == {"none", "rival"}
    assert page.tables["Workload quiz: every figure"].keys() == METHODS.keys()


def test_a_budget_of_accuracy_is_drawn_as_one(tmp_path: Path) -> None:
    document = calibrated()
    document["calibration"]["budget"] = "points<=2"
    document["calibration"]["theta"] = 0.0401  # rounded up from the curve's .04
    for i, point in enumerate(document["calibration"]["curve"]):
        point |= {"accuracy": 0.75 - 0.0125 * i, "points": 1.25 * i, "at_most": 1.5 * i}
    found = Page(report(tmp_path, document))
    assert "reuse-accuracy" in found.ids
    assert "budget 73%" in found.text
    assert found.text.count("chosen, θ = 0.0401") == 4
    assert "points<=2, to be kept on 90% of resampled traces" in found.text


def test_other_settings_are_said(tmp_path: Path) -> None:
    first, second = evaluated(), evaluated()
    second["settings"]["anchors"] = 9
    assert "anchors is 4 in 0.json, 9 in 1.json" in Page(report(tmp_path, first, second)).text


def _changed(path: str, value: object) -> dict[str, Any]:
    document = whole()
    at: Any = document
    *parents, last = path.split("/")
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[int(last) if isinstance(at, list) else last] = value
    return document


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (_changed("model", "other/Model"), "1.json: model is 'other/Model', in .*0.json it is"),
        (_changed("edges/solver:critic/rival/kl", 0.5), "1.json: edges.solver:critic.rival differs from that in"),
        (_changed("workloads/quiz/traces", 13), "1.json: workloads.quiz.traces differs"),
        (_changed("workloads/quiz/hops/0/kl", 1.0), "1.json: workloads.quiz.hops.none 1 differs"),
        (_changed("ranks/solver:critic/delta_k", [1.0]), "1.json: ranks.solver:critic differs"),
        (_changed("chain/summary/0/kl", 1.0), "1.json: chain differs"),
        (_changed("calibration/theta", 0.03), "1.json: calibration differs"),
        (_changed("ablations/rank/0/kl_vs_none", 9.0), "1.json: ablations.rank differs"),
        (_changed("summary/none/kl", "much"), r"1.json: .*Expected `float`.*summary.*kl"),
        (_changed("summary/none/kl_ci", [1.0]), r"1.json: .*length 2.*kl_ci"),
        (_changed("summary/none/accuracy", 70), r"1.json: .*<= 1.*accuracy"),
        (_changed("calibration/curve/1/theta", None), r"1.json: .*calibration.curve\[1\].theta"),
        ({"summary": {}}, "1.json: .*missing required field `model`"),
        ([], "1.json: .*Expected `object`"),
    ],
)
def test_documents_that_do_not_fit_are_named(second: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        report(tmp_path, whole(), second)
    assert not (tmp_path / "report.html").exists()


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    good = written(tmp_path, whole())
    with pytest.raises(ConfigError, match=r"missing\.json: cannot be read"):
        run_report([tmp_path / "missing.json"], tmp_path / "report.html", None)
    (tmp_path / "half.json").write_text(json.dumps(whole())[:99], "utf-8")
    with pytest.raises(ConfigError, match=r"half\.json: not JSON"):
        run_report([tmp_path / "half.json"], tmp_path / "report.html", None)
    with pytest.raises(ConfigError, match="at least one JSON file"):
        run_report([], tmp_path / "report.html", None)
    with pytest.raises(ConfigError, match=r"--out .*cannot be written"):
        run_report(good, good[0] / "report.html", None)
    with pytest.raises(ConfigError, match=r"--plots .*cannot be written"):
        run_report(good, tmp_path / "report.html", good[0] / "plots")
    with pytest.raises(ConfigError, match="no figures to report"):
        report(tmp_path, {"model": MODEL})


def test_names_are_text_and_nothing_else(page: str, tmp_path: Path) -> None:
    """Roles, methods and settings are a user's: they must neither run in a reader's browser nor break a chart."""
    text = json.dumps(evaluated() | calibrated() | ablated())
    for name in ("planner", '"rival', "quiz", "chained", '"16"', "lmcache.yaml", "Synthetic"):
        quoted = json.dumps(HOSTILE)[1:-1]
        text = text.replace(name, f'"{quoted}' if name[0] == '"' else quoted)
        if name == '"16"':
            text = text.replace(f'"{quoted}, ', f'"{quoted}", ')
    hostile = report(tmp_path, json.loads(text))
    found = Page(hostile)
    assert "<script" not in hostile
    assert HOSTILE in found.text
    assert found.tags <= Page(page).tags
    assert len(found.ids) == len(set(found.ids))


def test_ids_are_unique_and_nothing_is_loaded(page: str) -> None:
    found = Page(page)
    assert len(found.ids) == len(set(found.ids))
    assert not re.search(r"(?:src|href|url\()\s*=?\s*[\"']?(?:https?:|//|file:)", page)
    assert {"#" + i for i in found.ids} >= set(re.findall(r'href="(#[^"]*)"', page))


def test_better_is_said_only_where_an_interval_says_so(tmp_path: Path) -> None:
    """The paired interval tells `near` apart, though their own intervals overlap; without it nothing does."""
    few = {m: s for m, s in evaluated()["summary"].items() if m != "attention+head+gate"}
    given = {"model": MODEL, "summary": few, "better": evaluated()["better"]}
    said = Page(report(tmp_path, given)).text
    assert "Of the methods that recompute at most 15%, attention+head has the lowest KL: 2.00" in said
    assert "That is lower than all others." in said
    said = Page(report(tmp_path, given | {"better": []})).text
    assert "No interval separates it from near." in said
    assert "lower than all others." not in said
    worse = [b | {"difference": 0.1, "ci": [0.05, 0.2]} for b in given["better"]]
    assert "It is higher than near." in Page(report(tmp_path, given | {"better": worse})).text


def test_the_summary_names_the_budget_and_what_is_missing(page: str, tmp_path: Path) -> None:
    said = Page(page).text
    assert "On held-out traces it reuses 70% of the tokens" in said
    assert "within the budget" in said
    assert "No interval separates any of them from dense prefill." in said
    assert "No task accuracy was measured." not in said
    document = _changed("calibration/heldout/within_budget", False)
    del document["workloads"]
    said = Page(report(tmp_path, document)).text
    assert "outside the budget" in said
    assert "No task accuracy was measured." in said


def test_plots_are_files_when_asked_for(tmp_path: Path) -> None:
    run_report(written(tmp_path, calibrated(), ablated()), tmp_path / "report.html", tmp_path / "new" / "plots")
    stems = [f"{name}{suffix}" for name in ("ablation-rank", "reuse-kl") for suffix in ("", "-dark")]
    names = sorted(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg"))
    assert sorted(f.name for f in (tmp_path / "new" / "plots").iterdir()) == names
    for file in (tmp_path / "new" / "plots").iterdir():
        if file.suffix == ".svg":
            assert ET.parse(file).getroot().tag.endswith("svg")
        else:
            assert file.read_bytes().startswith(b"\x89PNG")


def test_a_page_is_the_same_each_time(page: str, tmp_path: Path) -> None:
    """Reports are kept beside results: one that changes without cause hides what changed."""
    assert report(tmp_path, whole()) == page


def test_a_long_evaluation_stays_light(tmp_path: Path) -> None:
    """20 methods, three edges, 20 contexts: 1200 rows."""
    document = whole()
    names = [f"method-{i}" for i in range(20)]
    row = document["rows"][0]
    document["rows"] = [
        row | {"method": m, "context": f"c{i}", "edge": e} for m in names for i in range(20) for e in "abc"
    ]
    document["summary"] = {m: summary("rival") for m in ("none", *names)}
    document["workloads"] = {f"w{i}": document["workloads"]["quiz"] for i in range(3)}
    assert len(report(tmp_path, document)) < 3e6
    document["rows"] *= 2
    document["rows"] = [r | {"tokens": i} for i, r in enumerate(document["rows"])]
    assert "2400 rows, too many for a page" in report(tmp_path, document)


def test_what_evaluate_writes_can_be_reported(tiny: DenseRuns, tmp_path: Path) -> None:
    """A page that could not read the real files would be found out by users only."""
    settings = EvaluateSettings((("solver", "critic"),), anchors=2)
    rows, chain = evaluate(tiny, settings), evaluate_chain(tiny, ["solver", "critic"], anchors=2)
    ranks = {"solver:critic": effective_ranks([tiny.case("solver", "critic", c) for c in tiny.workload.anchors[:2]])}
    real = document("tiny", settings.shown(), rows, chain, (), ranks)
    found = Page(report(tmp_path, json.loads(json.dumps(real))))
    assert {"methods", "tradeoff", "memory", "hops", "ranks", "rows"} <= set(found.ids)
    assert found.tables["Edge solver → critic: every figure"].keys() == real["summary"].keys()


@pytest.mark.parametrize("factor", [0.0, 1e-9, 1.0, 1e6])
def test_extreme_figures_are_drawn(factor: float, tmp_path: Path) -> None:
    """A method may be exact (KL 0), or very wrong; an interval may reach 0."""
    document = whole()
    for summaries in (document["summary"], *document["edges"].values()):
        for figures in summaries.values():
            figures["kl"] *= factor
            figures["kl_ci"] = [0.0, figures["kl_ci"][1] * factor]
    for hop in (*document["chain"]["summary"], *document["workloads"]["quiz"]["hops"]):
        hop["kl"], hop["kl_ci"] = hop["kl"] * factor, [0.0, hop["kl_ci"][1] * factor]
    assert Page(report(tmp_path, document)).tables["All 2 edges: every figure"].keys() == METHODS.keys()
