"""`kvcmas warmup`: what it says beforehand, and that what it did is not done again."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import yaml
from command_line import run
from redis_server import RedisServer

from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors.commands.catalogue import Warm, warm_name
from lmcache_kvcmas.connectors.commands.warm_plan import Job, Team, estimate, geometry_of
from lmcache_kvcmas.connectors.redis_client import RedisClient
from lmcache_kvcmas.connectors.redis_names import Names, model_mark
from lmcache_kvcmas.connectors.redis_settings import RedisSettings
from lmcache_kvcmas.entries import EntryKind, Owner
from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.evaluate.workload import Context, Workload
from lmcache_kvcmas.workflow import Turn, load_workflow

WORKLOAD = Path(__file__).parents[2] / "examples" / "workload"
FILES = ("--roles", WORKLOAD / "roles.json", "--contexts", WORKLOAD / "contexts.jsonl")
AGENTS = "planner,solver,critic"


def flat(output: str) -> str:
    return " ".join(output.split())


class Place:
    def __init__(self, server: RedisServer, folder: Path, **settings: object) -> None:
        server.cli("FLUSHALL")
        self.config = folder / "lmcache.yaml"
        extra = {"remote_storage_plugin.kvcmas.url": server.url, "remote_storage_plugin.kvcmas.timeout_ms": 5000}
        content = {"max_local_cpu_size": 0.5, "remote_storage_plugins": ["kvcmas"], "extra_config": extra | settings}
        self.config.write_text(yaml.safe_dump(content))
        self.client = RedisClient(RedisSettings(server.url, timeout_ms=5000))


@pytest.fixture
def place(command_server: RedisServer, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as opened:
        made = Place(command_server, tmp_path)
        opened.callback(made.client.close)
        yield made


def test_a_dry_run_says_how_much_and_writes_nothing(place: Place, model: Path) -> None:
    options = ("warmup", "--config", place.config, "--model", model, *FILES, "--limit", "2", "--workflow", AGENTS)
    result = run(*options, "--dry-run")
    assert result.exit_code == 0, result.output
    output = flat(result.output)
    assert "0 of 2 contexts are there already, 2 to do" in output
    assert "prompts 6 of" in output
    assert "at 250 tokens/s" in output
    assert max(map(len, result.output.splitlines())) <= 80
    assert not list(place.client.scan("*"))


def test_what_is_marked_and_there_is_left_out(place: Place, model: Path) -> None:
    """A mark counts as long as its records are there."""
    from transformers import AutoTokenizer

    from lmcache_kvcmas.connectors.commands.warm_plan import jobs_of
    from lmcache_kvcmas.evaluate.workload import load_workload

    workload = load_workload(WORKLOAD / "roles.json", WORKLOAD / "contexts.jsonl")
    team = Team(workload, load_workflow(AGENTS, workload.roles), 32, "", False)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    job = next(jobs_of(team, tokenizer, workload.contexts[:1], Settings(), 256))
    fingerprint = geometry_of(model, "bfloat16").fingerprint
    record = bytes(range(32))
    name = Names("kvcmas", Owner(fingerprint)).entry(EntryKind.RECORD, record)
    place.client.put_many([(name, b"a record")])
    mark = msgspec.msgpack.encode(Warm("0" * 12, [record], time.time()))
    place.client.hash_set(warm_name("kvcmas", model_mark(fingerprint)), job.mark, mark)
    options = ["warmup", "--config", place.config, "--model", model, *FILES, "--limit", "1", "--dtype", "bfloat16"]
    options += ["--workflow", AGENTS]
    result = run(*options)  # needs no engine: there is nothing to do
    assert result.exit_code == 0, result.output
    assert "1 of 1 contexts are there already, 0 to do" in flat(result.output)
    other = run(*options, "--max-tokens", "16", "--dry-run")
    assert "1 to do" in flat(other.output), "another length is another mark"
    place.client.remove_many([name])
    again = run(*options, "--dry-run")
    assert "1 to do" in flat(again.output), "its record is gone"


@pytest.mark.parametrize(
    ("workflow", "message"),
    [("planner,judge", "'judge'; it must be one of planner"), ("critic,critic", "one turn"), ("no.json", "as JSON")],
)
def test_wrong_workflows_are_named(place: Place, model: Path, workflow: str, message: str) -> None:
    result = run("warmup", "--config", place.config, "--model", model, *FILES, "--workflow", workflow, "--dry-run")
    assert result.exit_code == 2
    assert message in flat(result.output)


def test_a_workflow_file_gives_headings(tmp_path: Path) -> None:
    file = tmp_path / "workflow.json"
    file.write_text(json.dumps({"turns": [{"agent": "solver", "heading": "Solution:"}, {"agent": "critic"}]}))
    turns = load_workflow(str(file), {"solver": "", "critic": ""})
    assert turns == (Turn("solver", "Solution:"), Turn("critic", "Critic:"))
    file.write_text(json.dumps({"turns": [{"agent": 3}]}))
    with pytest.raises(ConfigError, match="a turn"):
        load_workflow(str(file), {"solver": ""})


def test_the_estimate_is_bytes_of_tensors(model: Path) -> None:
    """By hand: one context of 300 shared tokens, two agents, 8 tokens said each."""
    geometry = geometry_of(model, "float32")
    context = Context("c", True, "")
    team = Team(Workload({}, {}, (context,)), (Turn("a", ""), Turn("b", "")), 8, "", False)
    about = estimate([Job(context, b"", (350, 400), (0, 332))], team, geometry, Settings(rank=32), 100.0)
    layers, channels = geometry.layers, geometry.channels
    assert about.bases == 4 * 2 * layers * channels * ((350 + 8) + (400 + 8 - 300))
    assert about.deltas == 4 * 2 * layers * 32 * (300 + channels)
    assert about.anchors == 4 * 2 * layers * 32 * (256 + channels) + 256 * (8 * layers + 4)
    assert about.seconds == pytest.approx((750 + 16) / 100)


@pytest.mark.engine
def test_a_second_run_has_nothing_to_do_and_another_engine_reuses(
    place: Place, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: fill, find it done, and a server that starts afterwards takes over on its first request."""
    from engines import engine
    from workflow import Roles

    options = ("warmup", "--config", place.config, "--model", model, *FILES, "--limit", "2", "--dtype", "float32")
    options += ("--workflow", "planner,solver", "--max-tokens", "16")
    first = run(*options)
    assert first.exit_code == 0, first.output
    assert "2 contexts warmed" in flat(first.output)
    before = {bytes(name) for name in place.client.scan("*")}
    begun = time.monotonic()
    second = run(*options)
    assert second.exit_code == 0, second.output
    assert "2 of 2 contexts are there already, 0 to do" in flat(second.output)
    assert {bytes(name) for name in place.client.scan("*")} == before
    print(f"the second run took {time.monotonic() - begun:.1f} s")
    assert run("verify", "--config", place.config).exit_code == 0

    given = yaml.safe_load(place.config.read_text())
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(place.config))
    context = json.loads((WORKLOAD / "contexts.jsonl").read_text("utf-8").splitlines()[0])["text"]
    settings = {"theta": 1.0}
    lmcache = {k: v for k, v in given.items() if k != "extra_config"}
    lmcache["extra_config"] = given["extra_config"] | {f"kvcmas.{k}": v for k, v in settings.items()}
    with engine(model, lmcache=lmcache) as llm:
        prompt = Roles.read().prompt(llm.llm.get_tokenizer(), "solver", context)
        answer = llm.ask(prompt, 4)
    assert answer.report["reused_tokens"] > 0, answer.report
