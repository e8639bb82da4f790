"""Records as entries: another node gets back what was written, and nothing that contradicts itself."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.manifest import from_tensors, needed, to_tensors
from lmcache_kvcmas.records import Record, Segment
from lmcache_kvcmas.spans import Piece

KEY = b"k" * 32


@st.composite
def records(draw: st.DrawFn) -> Record:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    ends = np.cumsum(lengths).tolist()
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    keys = st.binary(min_size=32, max_size=32)
    pieces = []
    for start, end in bounds:
        if not draw(st.booleans()):
            continue  # a hole
        delta = draw(st.none() | keys)
        row, delta_row = draw(st.integers(0, 999)), draw(st.integers(0, 999))
        pieces.append(Piece(start, end, draw(keys), row, delta, delta_row if delta else 0, draw(st.booleans())))
    segments = tuple(Segment(a, b, draw(st.integers(-1, 9)), draw(st.floats(0, 1))) for a, b in bounds)
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=ends[-1], max_size=ends[-1]))
    names = st.none() | st.text(max_size=20)
    return Record(
        KEY,
        np.array(tokens, np.int32),
        draw(st.integers(0, ends[-1])),
        tuple(pieces),
        segments,
        draw(names),
        draw(names),
        draw(st.text(max_size=8)),
        7,
    )


def same(a: Record, b: Record) -> bool:
    fields = ("id", "prompt_tokens", "pieces", "segments", "agent", "workflow", "salt", "sequence")
    return np.array_equal(a.tokens, b.tokens) and all(getattr(a, f) == getattr(b, f) for f in fields)


@given(records())
def test_a_record_comes_back(record: Record) -> None:
    tensors, meta = to_tensors(record)
    assert same(from_tensors(KEY, tensors, meta, sequence=7), record)


def record() -> Record:
    pieces = (
        Piece(0, 16, b"a" * 32, 0),
        Piece(16, 30, b"a" * 32, 16),
        Piece(30, 40, b"b" * 32, 3, b"d" * 32, 1, False),
    )
    return Record(KEY, np.arange(40, dtype=np.int32), 35, pieces, agent="critic", salt="t")


def test_what_a_record_needs() -> None:
    """Manifest last: all of these have to be there before it is told of. Each once, whatever points at it."""
    assert needed(record()) == (
        (b"a" * 32, EntryKind.BASE),
        (b"b" * 32, EntryKind.BASE),
        (b"d" * 32, EntryKind.DELTA),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", torch.arange(40)),
        ("tokens", torch.arange(0, dtype=torch.int32)),
        ("tokens", torch.arange(39, dtype=torch.int32)),
        ("tokens", torch.zeros(5, 8, dtype=torch.int32)),
        ("pieces", torch.zeros(3, 6, dtype=torch.int64)),
        ("pieces", torch.tensor([[0, 99, 0, 0, 1, 0]] * 3)),
        ("pieces", torch.tensor([[0, 16, -1, 0, 1, 0], [16, 30, 0, 0, 1, 0], [30, 40, 0, 0, 1, 0]])),
        ("pieces", torch.tensor([[0, 16, 2**60, 0, 1, 0], [16, 30, 0, 0, 1, 0], [30, 40, 0, 0, 1, 0]])),
        ("chunks", torch.zeros(3, 31, dtype=torch.uint8)),
        ("deltas", torch.zeros(2, 32, dtype=torch.uint8)),
        ("segments", torch.tensor([[0, 20, 0]])),
        ("error2", torch.tensor([0.0, float("nan")], dtype=torch.float64)),
        ("error2", torch.tensor([0.0, -1.0], dtype=torch.float64)),
    ],
)
def test_what_contradicts_itself_is_refused(name: str, value: torch.Tensor) -> None:
    tensors, meta = to_tensors(record())
    with pytest.raises(EntryError):
        from_tensors(KEY, tensors | {name: value}, meta)


@pytest.mark.parametrize(
    "changed", [{"prompt_tokens": 99}, {"prompt_tokens": "x"}, {"agent": 7}, {"tenant": 1.5}, {"workflow": 2}]
)
def test_meta_of_another_form_is_refused(changed: dict[str, Any]) -> None:
    tensors, meta = to_tensors(record())
    with pytest.raises(EntryError):
        from_tensors(KEY, tensors, {**meta, **changed})


@settings(max_examples=300)
@given(
    st.sampled_from(["tokens", "pieces", "chunks", "deltas", "segments", "error2"]),
    st.lists(st.integers(-(2**62), 2**62), max_size=24),
    st.sampled_from([torch.int32, torch.int64, torch.uint8, torch.float64]),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
)
def test_nothing_else_gets_out(name: str, values: list[int], dtype: torch.dtype, shape: list[int]) -> None:
    """Whatever a tensor of it is: a whole record, or an EntryError."""
    tensors, meta = to_tensors(record())
    size = int(np.prod(shape))
    filled = torch.tensor((values * (size + 1) + [0] * size)[:size], dtype=torch.float64).to(dtype).view(shape)
    try:
        read = from_tensors(KEY, tensors | {name: filled}, meta)
    except EntryError:
        return
    assert len(read.tokens) >= read.prompt_tokens


@pytest.mark.parametrize("name", ["tokens", "pieces", "chunks", "deltas", "segments", "error2"])
def test_a_part_is_missing(name: str) -> None:
    tensors, meta = to_tensors(record())
    del tensors[name]
    with pytest.raises(EntryError):
        from_tensors(KEY, tensors, meta)
