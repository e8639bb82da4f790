"""Hints. Lost otherwise: the engine, to a client that sends nonsense; or a hint, dropped without a word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kvcmas.hints import Hints, parse_hints

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
junk = st.recursive(scalars, lambda x: st.lists(x) | st.dictionaries(scalars, x), max_leaves=8)
fields = st.sampled_from(["agent", "workflow", "source", "share", "capture", "more"])


@given(params=junk | st.fixed_dictionaries({"kvcmas": junk | st.dictionaries(fields, junk)}))
def test_anything_gives_hints(params):
    hints, problems = parse_hints(params)
    assert isinstance(hints.share, bool)
    assert isinstance(hints.capture, bool)
    assert all(v is None or (isinstance(v, str) and 0 < len(v) <= 256) for v in (hints.agent, hints.workflow))
    assert all(len(p) < 400 for p in problems)


def test_what_is_said_is_heard():
    said = {"agent": "critic", "workflow": "w", "source": " solver ", "share": False, "capture": False}
    assert parse_hints({"kvcmas": said, "other": 1}) == (Hints("critic", "w", "solver", False, False), ())
    assert parse_hints(None) == parse_hints({}) == parse_hints({"kvcmas": None}) == (Hints(), ())


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"agent": 7}, "kvcmas.agent must be a string that is not empty, got 7: ignored"),
        ({"agent": "  "}, "kvcmas.agent must be a string that is not empty, got '  ': ignored"),
        ({"source": "x" * 257}, "kvcmas.source has 257 characters, at most 256 are allowed: ignored"),
        ({"share": "no"}, "kvcmas.share must be true or false, got 'no': ignored"),
        ({"agnet": "x"}, "kvcmas.{'agnet'} is unknown (known: agent, workflow, source, share, capture): ignored"),
        ([], "kv_transfer_params.kvcmas must be an object, got list: ignored"),
    ],
)
def test_what_is_wrong_is_named_and_the_rest_is_kept(given_, said):
    hints, problems = parse_hints({"kvcmas": {**given_, "workflow": "w"} if isinstance(given_, dict) else given_})
    assert problems == (said,)
    assert hints == Hints(workflow="w" if isinstance(given_, dict) else None)
