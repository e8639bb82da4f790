"""The files that `kvcmas evaluate` reads. A person who gets them wrong must be told where."""

import json
from pathlib import Path

import pytest

from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.evaluate.workload import load_workload

EXAMPLE = Path(__file__).parents[2] / "examples" / "workload"
ROLES = {"roles": {"a": "You are a."}, "instructions": {"a": "Go."}}
LINE = {"id": "x", "use": "dev", "text": "Hello."}


def write(folder: Path, roles: object, *lines: object) -> tuple[Path, Path]:
    one, two = folder / "roles.json", folder / "contexts.jsonl"
    one.write_text(roles if isinstance(roles, str) else json.dumps(roles))
    two.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return one, two


def test_the_example_loads() -> None:
    workload = load_workload(EXAMPLE / "roles.json", EXAMPLE / "contexts.jsonl")
    assert (len(workload.anchors), len(workload.tests)) == (16, 10)
    assert {"planner", "solver", "critic", "reflector"} <= set(workload.roles)


def test_anchor_lines_fill_the_pool_and_all_others_test(tmp_path: Path) -> None:
    files = write(tmp_path, ROLES, LINE, {**LINE, "id": "y", "use": "anchor"}, "", {**LINE, "id": "z", "use": "what"})
    workload = load_workload(*files)
    assert [c.id for c in workload.anchors] == ["y"]
    assert [c.id for c in workload.tests] == ["x", "z"]


@pytest.mark.parametrize(
    ("roles", "lines", "message"),
    [
        ("{", [LINE], "roles.json is not JSON"),
        ([], [LINE], "'roles' must be an object of texts"),
        ({"roles": {"a": 1}, "instructions": {}}, [LINE], "'roles' must be an object of texts"),
        ({"roles": {"a": "x"}, "instructions": {}}, [LINE], "missing: a"),
        (ROLES, [LINE, "{"], r"contexts.jsonl:2 is not JSON"),
        (ROLES, [{"id": "x", "text": "y"}], r"contexts.jsonl:1: a context is"),
        (ROLES, [{**LINE, "text": " "}], "'x' has no text"),
        (ROLES, [LINE, LINE], r"seen twice: \['x'\]"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, roles: object, lines: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(*write(tmp_path, roles, *lines))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        load_workload(tmp_path / "none.json", EXAMPLE / "contexts.jsonl")
