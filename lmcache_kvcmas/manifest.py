"""Records as entries: what another node needs to know to take over what a request left behind."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmcache_kvcmas.entries import EntryKind, Meta
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.keys import KEY_BYTES
from lmcache_kvcmas.records import Record, Segment
from lmcache_kvcmas.spans import Piece

_MAX_TOKENS = 1 << 24
_MAX_ERROR2 = 1e6


class Needed(NamedTuple):
    """An entry that a record points at."""

    key: bytes
    kind: EntryKind


def needed_by(piece: Piece) -> tuple[Needed, ...]:
    base = Needed(piece.chunk, EntryKind.BASE)
    return (base,) if piece.delta is None else (base, Needed(piece.delta, EntryKind.DELTA))


def needed(record: Record) -> tuple[Needed, ...]:
    """The entries without which the record is of no use, each once, in the order of the tokens."""
    return tuple(dict.fromkeys(n for piece in record.pieces for n in needed_by(piece)))


def to_tensors(record: Record) -> tuple[dict[str, Tensor], Meta]:
    """Tensors and meta of a RECORD entry. ``sequence`` is not in it: it counts arrivals at one node."""
    pieces, none = record.pieces, bytes(KEY_BYTES)
    bounds = [(p.start, p.end, p.row, p.delta_row, int(p.exact), int(p.delta is not None)) for p in pieces]
    tensors = {
        "tokens": torch.from_numpy(record.tokens.copy()),
        "pieces": torch.tensor(bounds, dtype=torch.int64).view(-1, 6),
        "chunks": _keys([p.chunk for p in pieces]),
        "deltas": _keys([p.delta or none for p in pieces]),
        "segments": torch.tensor([s[:3] for s in record.segments], dtype=torch.int64).view(-1, 3),
        "error2": torch.tensor([s.error2 for s in record.segments], dtype=torch.float64),
    }
    meta: dict[str, int | float | str] = {"prompt_tokens": record.prompt_tokens, "tenant": record.salt}
    if record.agent is not None:
        meta["agent"] = record.agent
    if record.workflow is not None:
        meta["workflow"] = record.workflow
    return tensors, meta


def from_tensors(key: bytes, tensors: Mapping[str, Tensor], meta: Meta, sequence: int = 0) -> Record:
    """The record of a RECORD entry that has the key ``key``.

    Raises:
        EntryError: a part is missing, of another form, or contradicts the others.
    """
    try:
        tokens, bounds, chunks, deltas, segments, error2 = (
            tensors[name] for name in ("tokens", "pieces", "chunks", "deltas", "segments", "error2")
        )
        _check(tokens, torch.int32, (None,))
        _check(bounds, torch.int64, (None, 6))
        _check(chunks, torch.uint8, (len(bounds), KEY_BYTES))
        _check(deltas, torch.uint8, (len(bounds), KEY_BYTES))
        _check(segments, torch.int64, (None, 3))
        _check(error2, torch.float64, (len(segments),))
        if not 0 < len(tokens) < _MAX_TOKENS:
            raise EntryError(f"a record of {len(tokens)} tokens")
        if not bool(((error2 >= 0) & (error2 <= _MAX_ERROR2)).all()):
            raise EntryError("a record with an impossible error")
        if len(bounds) and (int(bounds.min()) < 0 or int(bounds[:, :4].max()) > _MAX_TOKENS):
            raise EntryError("a record that points outside of every chunk")
        agent, workflow, tenant = meta.get("agent"), meta.get("workflow"), meta["tenant"]
        prompt_tokens = meta["prompt_tokens"]
        if not (
            isinstance(tenant, str)
            and isinstance(prompt_tokens, int)
            and isinstance(agent, str | None)
            and isinstance(workflow, str | None)
        ):
            raise EntryError("a record whose meta has other types")
        rows = zip(bounds.tolist(), _rows(chunks), _rows(deltas), strict=True)
        return Record(
            id=key,
            tokens=tokens.numpy().astype(np.int32, copy=True),
            prompt_tokens=prompt_tokens,
            pieces=tuple(
                Piece(start, end, chunk, row, delta if has_delta else None, delta_row, bool(exact))
                for (start, end, row, delta_row, exact, has_delta), chunk, delta in rows
            ),
            segments=tuple(
                Segment(start, end, slot, error)
                for (start, end, slot), error in zip(segments.tolist(), error2.tolist(), strict=True)
            ),
            agent=agent,
            workflow=workflow,
            salt=tenant,
            sequence=sequence,
        )
    except KeyError as error:
        raise EntryError(f"a record without {error}") from error
    except ValueError as error:
        raise EntryError(str(error)) from error


def _keys(keys: list[bytes]) -> Tensor:
    return (
        torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, KEY_BYTES)
        if keys
        else (torch.empty(0, KEY_BYTES, dtype=torch.uint8))
    )


def _rows(keys: Tensor) -> list[bytes]:
    blob = keys.contiguous().numpy().tobytes()
    return [blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES)]


def _check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    fits = tensor.dim() == len(shape) and all(
        want is None or want == n for want, n in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        raise EntryError(f"a record's tensor is {tensor.dtype} {tuple(tensor.shape)}")
