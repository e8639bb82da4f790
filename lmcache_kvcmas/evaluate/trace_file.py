"""A user's own traces, as a log of chat requests: JSONL, one request a line.

========== ================================ ====================================================================
Key        Value                            Meaning
========== ================================ ====================================================================
trace      text                             which workflow the request belongs to; its requests stand in order
messages   list of chat messages            ``{"role", "content"}``; content is text or ``[{"type": "text", "text"}]``
agent      text, optional                   who asked
response   text, optional                   what was answered; without it the model answers itself
max_tokens whole number, optional           bound of the model's own answer (32)
use        learn, dev or test, optional     the same in all requests of a trace; see below
expected   text, optional                   the trace's last answer is right when it contains this
========== ================================ ====================================================================

All other keys (model, temperature, ...) are ignored. Traces that name no use get one by position among those that name
none: the first half is ``learn``, and of the others every second one, from the first, is ``dev`` and the rest ``test``.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .tasks.judges import Contains
from .tasks.splits import USES
from .traces import Call, Message, Trace

ROLES = ("system", "user", "assistant")
_OPTIONAL_TEXTS = ("agent", "response", "use", "expected")
_MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class _Request:
    where: str
    """File and line."""
    trace: str
    call: Call
    use: str | None
    expected: str | None


def read_traces(path: Path, workload: str | None = None) -> list[Trace]:
    """Traces of ``path``, in the order of their first requests, all under the name ``workload`` (the file's, if none).

    Raises ConfigError naming file and line, the key, its value and what is allowed.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error
    lines = [(f"{path}:{i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{path} holds no request; a line is an object with 'trace' and 'messages'")
    grouped: dict[str, list[_Request]] = {}
    for request in (_request(line, where) for where, line in lines):
        grouped.setdefault(request.trace, []).append(request)
    uses = {trace: _agreed(requests, "use") for trace, requests in grouped.items()}
    by_position = iter(_uses_by_position(sum(use is None for use in uses.values())))
    return [
        _trace(trace, path.stem if workload is None else workload, uses[trace] or next(by_position), requests)
        for trace, requests in grouped.items()
    ]


def _uses_by_position(count: int) -> list[str]:
    learn = (count + 1) // 2
    return ["learn" if i < learn else ("dev", "test")[(i - learn) % 2] for i in range(count)]


def _trace(trace: str, workload: str, use: str, requests: Sequence[_Request]) -> Trace:
    expected = _agreed(requests, "expected")
    judge = None if expected is None else Contains(expected)
    return Trace(trace, workload, use, tuple(r.call for r in requests), judge)


def _agreed(requests: Iterable[_Request], key: str) -> str | None:
    """What the requests of one trace say of ``key``; those that say nothing agree with all. Raises ConfigError."""
    said: str | None = None
    for request in requests:
        value: str | None = getattr(request, key)
        if value is None:
            continue
        if said not in (None, value):
            raise ConfigError(f"{request.where}: {key!r} of trace {request.trace!r} is {value!r}, and {said!r} before")
        said = value
    return said


def _request(line: str, where: str) -> _Request:
    try:
        data = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a request is an object with 'trace' and 'messages', not {_shown(data)}")
    trace = data.get("trace")
    if not isinstance(trace, str) or not trace:
        raise ConfigError(f"{where}: 'trace' is {_shown(trace)}; it must be a text, the workflow's id")
    texts = {key: _optional_text(data, key, where) for key in _OPTIONAL_TEXTS}
    if texts["use"] not in (None, *USES):
        raise ConfigError(f"{where}: 'use' is {texts['use']!r}; it must be one of {', '.join(USES)}")
    if texts["expected"] is not None and not texts["expected"].strip():
        raise ConfigError(f"{where}: 'expected' is {texts['expected']!r}; every answer contains that")
    call = Call(texts["agent"], _messages(data.get("messages"), where), _max_tokens(data, where), texts["response"])
    return _Request(where, trace, call, texts["use"], texts["expected"])


def _optional_text(data: dict[str, Any], key: str, where: str) -> str | None:
    value = data.get(key)
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(f"{where}: {key!r} is {_shown(value)}; it must be a text")


def _max_tokens(data: dict[str, Any], where: str) -> int:
    value = data.get("max_tokens")
    if value is None:
        return _MAX_TOKENS
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: 'max_tokens' is {_shown(value)}; it must be a whole number, 1 or more")
    return value


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: 'messages' is {_shown(value)}; it must be a list of one chat message or more")
    return tuple(_message(message, f"{where}: message {i}") for i, message in enumerate(value, 1))


def _message(value: Any, where: str) -> Message:
    role = value.get("role") if isinstance(value, dict) else None
    if role not in ROLES:
        raise ConfigError(f"{where}: 'role' is {_shown(role)}; it must be one of {', '.join(ROLES)}")
    return Message(role, (_content(value.get("content"), where),))


def _content(value: Any, where: str) -> str:
    """The texts of a list become lines, as vLLM makes them."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        texts = [part.get("text") if part.get("type") == "text" else None for part in value]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(str(text) for text in texts)
    raise ConfigError(
        f'{where}: \'content\' is {_shown(value)}; it must be a text or a list of {{"type": "text", "text"}}'
    )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
