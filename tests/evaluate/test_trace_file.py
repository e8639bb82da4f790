"""A user's own request log: what stands in it is measured, and a mistake in it is found by file and line."""

import json
from pathlib import Path

import pytest

from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.evaluate.trace_file import read_traces
from lmcache_kvcmas.evaluate.traces import Message

USER = {"role": "user", "content": "Hello."}
LINE = {"trace": "t", "messages": [USER]}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return path


def test_a_request_log_becomes_traces(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are a.", "name": "ignored"}
    parts = {"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]}
    path = write(
        tmp_path,
        {"trace": "x", "agent": "a", "messages": [system, USER], "response": "Hi.", "model": "m", "temperature": 0.7},
        "",
        {"trace": "y", "messages": [USER], "max_tokens": 5},
        {"trace": "x", "messages": [system, parts], "use": "test", "expected": "yes"},
    )
    x, y = read_traces(path)
    assert (x.id, x.workload, x.use, y.id, y.use) == ("x", "mine", "test", "y", "learn")
    assert [(c.agent, c.answer, c.max_tokens) for c in x.calls] == [("a", "Hi.", 32), (None, None, 32)]
    assert x.calls[0].messages == (Message("system", ("You are a.",)), Message("user", ("Hello.",)))
    assert x.calls[1].messages[1] == Message("user", ("One.\nTwo.",))
    assert y.calls[0].max_tokens == 5
    assert y.judge is None
    assert x.judge is not None
    assert [x.judge(answer) for answer in ("Well, Yes.", "no", "yesterday")] == [1.0, 0.0, 0.0]
    assert read_traces(path, "log")[0].workload == "log"


@pytest.mark.parametrize(
    ("count", "uses"),
    [
        (1, ["learn"]),
        (2, ["learn", "dev"]),
        (3, ["learn", "learn", "dev"]),
        (8, ["learn"] * 4 + ["dev", "test", "dev", "test"]),
    ],
)
def test_traces_that_name_no_use_get_one_by_position(tmp_path: Path, count: int, uses: list[str]) -> None:
    path = write(tmp_path, *({**LINE, "trace": f"t{i}"} for i in range(count)))
    assert [trace.use for trace in read_traces(path)] == uses


def test_named_uses_do_not_move_the_others(tmp_path: Path) -> None:
    path = write(tmp_path, {**LINE, "trace": "named", "use": "test"}, LINE, {**LINE, "trace": "u"})
    assert [trace.use for trace in read_traces(path)] == ["test", "learn", "dev"]


def test_separators_inside_texts_do_not_break_lines(tmp_path: Path) -> None:
    message = {"role": "user", "content": "one\u2028two\x85three"}
    path = write(tmp_path, json.dumps({**LINE, "messages": [message]}, ensure_ascii=False))
    assert read_traces(path)[0].calls[0].messages[0].parts == (message["content"],)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([LINE, "{"], r"mine\.jsonl:2 is not JSON"),
        (["[" * 100_000], r"mine\.jsonl:1 is not JSON"),
        (["", "[]"], r"mine\.jsonl:2: a request is an object"),
        ([{"messages": [USER]}], r":1: 'trace' is null; it must be a text"),
        ([{**LINE, "trace": 7}], r"'trace' is 7; it must be a text"),
        ([{"trace": "t"}], r"'messages' is null; it must be a list"),
        ([{**LINE, "messages": []}], r"'messages' is \[\]; it must be a list of one"),
        ([{**LINE, "messages": [USER, "x"]}], r":1: message 2: 'role' is null; it must be one of system, user, assist"),
        ([{**LINE, "messages": [{"role": "tool", "content": "x"}]}], r"'role' is \"tool\"; it must be one of"),
        ([{**LINE, "messages": [{"role": "user"}]}], r"'content' is null; it must be a text or a list"),
        ([{**LINE, "messages": [{**USER, "content": [{"type": "image_url"}]}]}], r"'content' is \[\{\"type\": \"image"),
        ([{**LINE, "agent": 1}], r"'agent' is 1; it must be a text"),
        ([{**LINE, "max_tokens": 0}], r"'max_tokens' is 0; it must be a whole number, 1 or more"),
        ([{**LINE, "max_tokens": True}], r"'max_tokens' is true"),
        ([{**LINE, "use": "train"}], r"'use' is 'train'; it must be one of learn, dev, test"),
        ([{**LINE, "expected": " "}], r"'expected' is ' '"),
        ([{**LINE, "use": "dev"}, {**LINE, "use": "test"}], r":2: 'use' of trace 't' is 'test', and 'dev' before"),
        ([{**LINE, "expected": "a"}, LINE, {**LINE, "expected": "b"}], r":3: 'expected' of trace 't' is 'b', and 'a'"),
        ([""], r"mine\.jsonl holds no request"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_traces(write(tmp_path, *lines))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        read_traces(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"trace": "\xe9"}')
    with pytest.raises(ConfigError, match=r"latin\.jsonl cannot be read as UTF-8"):
        read_traces(tmp_path / "latin.jsonl")
