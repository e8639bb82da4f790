"""Entries as they are stored, byte for byte. What fails here is a change of format: every store in use would be lost.

``python tests/store/test_golden.py`` writes the files anew; do so only together with a new `entries.FORMAT`.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lmcache_kvcmas import codecs, entries
from lmcache_kvcmas.anchors import Anchor
from lmcache_kvcmas.entries import EntryKind, Owner, TensorSpec, decode, lay_out
from lmcache_kvcmas.factors import Factors
from lmcache_kvcmas.learner import named

FOLDER = Path(__file__).parent / "golden"
CREATED = 1_750_000_000.25
OWNER = Owner("fingerprint", 1, 2)
KEY = bytes(range(32))
LAYERS, TOKENS, HEADS, DIM = 2, 3, 2, 4


class Golden(NamedTuple):
    kind: EntryKind
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def ramp(*shape: int, step: float = 0.25, start: float = -3.0) -> Tensor:
    """Numbers that every dtype in use holds exactly."""
    return (torch.arange(torch.Size(shape).numel()) * step + start).view(shape)


def base(codec: str, dtype: torch.dtype) -> Golden:
    k, v = ramp(LAYERS, TOKENS, HEADS * DIM).to(dtype), ramp(LAYERS, TOKENS, HEADS * DIM, step=-0.5).to(dtype)
    k[1, 2, 4:] = 0  # a row without energy
    shapes = codecs.specs(codec, LAYERS, TOKENS, HEADS, DIM, dtype)
    tensors = {name: torch.empty(shape, dtype=of) for name, (shape, of) in shapes.items()}
    codecs.write(codec, k, v, HEADS, tensors)
    return Golden(EntryKind.BASE, tensors, codecs.meta(codec, 256, HEADS, dtype))


def factors(step: float, dtype: torch.dtype = torch.bfloat16) -> Factors:
    return Factors(ramp(LAYERS, TOKENS, 2, step=step).to(dtype), ramp(LAYERS, 2, 8, step=-step).to(dtype))


def delta() -> Golden:
    """Of the keys as factors, of the values whole."""
    whole = Factors(ramp(LAYERS, TOKENS, 8).to(torch.float16), None)
    return Golden(EntryKind.DELTA, named(factors(0.5, torch.float16), whole), {})


def anchor() -> Golden:
    made = Anchor(
        *(factors(step) for step in (0.25, 0.5, 1.0, 2.0)),
        offsets=torch.tensor([0, 4, 9], dtype=torch.int32),
        norm2_k=ramp(LAYERS, TOKENS, start=0),
        norm2_v=ramp(LAYERS, TOKENS, start=1),
    )
    return Golden(EntryKind.ANCHOR, made.tensors(), {"source": "solver", "destination": "critic", "slot": 0})


MADE: dict[str, Callable[[], Golden]] = {
    "base-raw": lambda: base("raw", torch.bfloat16),
    "base-int8": lambda: base("int8", torch.bfloat16),
    "base-fp8": lambda: base("fp8", torch.float32),
    "delta": delta,
    "anchor": anchor,
}
EACH = pytest.mark.parametrize("name", MADE)


def written(golden: Golden) -> bytes:
    layout = lay_out(golden.kind, KEY, OWNER, {n: TensorSpec.of(t) for n, t in golden.tensors.items()}, golden.meta)
    buffer = torch.full((layout.size,), 0xAA, dtype=torch.uint8)
    for name, view in layout.views(buffer).items():
        view.copy_(golden.tensors[name])
    layout.seal(buffer)
    return buffer.numpy().tobytes()


def file(name: str) -> bytes:
    return (FOLDER / f"{name}.bin").read_bytes()


@pytest.fixture(autouse=True)
def _then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands where it stood when the files were written."""
    monkeypatch.setattr(entries, "time", SimpleNamespace(time=lambda: CREATED))


@EACH
def test_an_entry_of_old_is_read(name: str) -> None:
    """A new release finds its stores filled by the one before."""
    want = MADE[name]()
    found = decode(torch.frombuffer(bytearray(file(name)), dtype=torch.uint8), kind=want.kind, owner=OWNER, key=KEY)
    assert (found.header.created, found.header.meta) == (CREATED, want.meta)
    assert {n: TensorSpec.of(t) for n, t in found.tensors.items()} == {
        n: TensorSpec.of(t) for n, t in want.tensors.items()
    }
    for n, t in want.tensors.items():
        assert torch.equal(found.tensors[n].contiguous().view(torch.uint8), t.contiguous().view(torch.uint8)), n


@EACH
def test_the_same_entry_is_written_today(name: str) -> None:
    """And one before finds them filled by the new one, as long as both are in use."""
    assert written(MADE[name]()) == file(name)


def test_what_a_chunk_of_old_means() -> None:
    """The numbers themselves, of one row: codes that are read with other scales would still be well-formed."""
    for name, want in (
        ("base-raw", [-3.0, -2.75, -2.5, -2.25]),
        ("base-int8", [-3.0, -2.734375, -2.5, -2.25]),  # -127, -116, -106, -95 steps of 3/127, to bf16's next 64th
        ("base-fp8", [-3.0, -416 * 3 / 448, -384 * 3 / 448, -320 * 3 / 448]),  # E4M3's neighbours of 411, 373, 336
    ):
        entry = decode(torch.frombuffer(bytearray(file(name)), dtype=torch.uint8), kind=EntryKind.BASE, owner=OWNER)
        got = codecs.read(entry.tensors, entry.header.meta, 0, TOKENS)
        assert got is not None
        assert got.position == 256
        torch.testing.assert_close(got.k[0, 0, :4].float(), torch.tensor(want), rtol=0, atol=1e-6)
        assert not got.k[1, 2, 4:].any()


def test_what_factors_of_old_mean() -> None:
    """An anchor and a delta whose parts were exchanged would be well-formed, too."""
    data = torch.frombuffer(bytearray(file("anchor")), dtype=torch.uint8)
    read = Anchor.from_tensors(decode(data, kind=EntryKind.ANCHOR, owner=OWNER).tensors)
    for held, step in ((read.delta_k, 0.25), (read.delta_v, 0.5), (read.base_k, 1.0), (read.base_v, 2.0)):
        assert torch.equal(held.expand(1), factors(step).expand(1))
    data = torch.frombuffer(bytearray(file("delta")), dtype=torch.uint8)
    tensors = decode(data, kind=EntryKind.DELTA, owner=OWNER).tensors
    assert set(tensors) == {"k.u", "k.v", "v.full"}


def test_the_files_are_the_ones_that_were_published() -> None:
    """A file that is written anew by mistake would make every test above pass."""
    digests = {name: hashlib.sha256(file(name)).hexdigest()[:16] for name in MADE}
    assert digests == {
        "base-raw": "28556dace9eefc5f",
        "base-int8": "831c0cdeb99ae9ac",
        "base-fp8": "8d21a152103f388f",
        "delta": "62cf14b00bee9c50",
        "anchor": "551bb1a8ab0035a9",
    }


if __name__ == "__main__":
    entries.time = SimpleNamespace(time=lambda: CREATED)  # type: ignore[assignment]
    for name, make in MADE.items():
        (FOLDER / f"{name}.bin").write_bytes(written(make()))
