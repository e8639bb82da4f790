"""Codecs of base chunks. A lossy chunk that is taken for an exact one is a wrong prefix that nobody notices."""

from collections import Counter
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import OpenStore
from torch import Tensor

from lmcache_kvcmas import codecs
from lmcache_kvcmas.agents import AgentRegistry
from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors.lmcache_store import LMCacheStore
from lmcache_kvcmas.entries import EntryKind, TensorSpec
from lmcache_kvcmas.errors import EntryError
from lmcache_kvcmas.hints import Hints
from lmcache_kvcmas.hot import HotRun, HotTier
from lmcache_kvcmas.index import RecordIndex
from lmcache_kvcmas.kernels.quantise import dequantise, quantise_fp8, quantise_int8
from lmcache_kvcmas.kernels.rope import RopeTable
from lmcache_kvcmas.keys import KeySpace
from lmcache_kvcmas.layout import CaptureLayout, ChunkWrite, lay_out
from lmcache_kvcmas.learner import named
from lmcache_kvcmas.lessons import Stretch, delta_factors, free_of
from lmcache_kvcmas.model import ModelGeometry, RopeSpec
from lmcache_kvcmas.planner import Planner
from lmcache_kvcmas.plans import LabelledPlan, plan_tag
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.sources import fetch, fetch_all, fetch_root
from lmcache_kvcmas.spans import Edge, Lesson, Piece, SpanKind

LAYERS, TOKENS, HEADS, DIM = 3, 24, 2, 16
CHANNELS = HEADS * DIM
CHUNK, DELTA = b"c" * 32, b"d" * 32
CPU = torch.device("cpu")
HOT = HotTier(0)
LOSSY = ("fp8", "int8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def store(open_small: OpenStore) -> LMCacheStore:
    return open_small()


def cache(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, LAYERS, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return k, v


def chunk(
    codec: str, dtype: torch.dtype = torch.float32, position: int = 7
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and meta of a chunk, as a writer makes them."""
    k, v = cache(dtype)
    shapes = codecs.specs(codec, LAYERS, TOKENS, HEADS, DIM, dtype)
    tensors = {name: torch.empty(shape, dtype=of) for name, (shape, of) in shapes.items()}
    codecs.write(codec, k, v, HEADS, tensors)
    return tensors, codecs.meta(codec, position, HEADS, dtype)


def keep(
    store: LMCacheStore,
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    key: bytes = CHUNK,
    kind: EntryKind = EntryKind.BASE,
) -> None:
    room = store.reserve(key, kind, {name: TensorSpec.of(t) for name, t in tensors.items()}, meta)
    assert room is not None
    for name, t in tensors.items():
        room.tensors[name].copy_(t)
    assert room.commit()


def piece(start: int = 0, end: int = TOKENS, exact: bool = False, **more: Any) -> Piece:
    return Piece(start, end, CHUNK, start, exact=exact, **more)


# --- what comes back ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", codecs.CODECS)
def test_a_chunk_comes_back_as_its_codec_promises(store: LMCacheStore, codec: str, dtype: torch.dtype) -> None:
    """Rows of it, too: a hop rarely takes a whole chunk."""
    k, v = cache(dtype)
    keep(store, *chunk(codec, dtype))
    quantise = {"raw": None, "fp8": quantise_fp8, "int8": quantise_int8}[codec]
    with ExitStack() as leases:
        for start, end in ((0, TOKENS), (5, 6), (10, TOKENS)):
            got = fetch_root(store, piece(start, end, exact=codec == "raw"), CPU, leases)
            assert got is not None
            assert (got.position, got.tokens, got.k.dtype, got.v.dtype) == (7 + start, end - start, dtype, dtype)
            for found, x in ((got.k, k), (got.v, v)):
                if quantise is not None:
                    x = dequantise(*quantise(x.view(LAYERS, TOKENS, HEADS, DIM)), dtype).flatten(2)
                assert torch.equal(found, x[:, start:end])


def test_what_was_stored_before_there_were_codecs_is_read(store: LMCacheStore) -> None:
    """Nodes are not updated all at once: k, v and a position are all that an entry of old has."""
    k, v = cache(torch.bfloat16)
    assert chunk("raw", torch.bfloat16)[1] == {"position": 7}
    keep(store, {"k": k, "v": v}, {"position": 7})
    with ExitStack() as leases:
        got = fetch_root(store, piece(exact=True), CPU, leases)
        assert got is not None
        assert torch.equal(got.k, k)


@pytest.mark.parametrize(("codec", "ratio"), [("raw", 1), ("fp8", (64 + 4) / 128), ("int8", (64 + 4) / 128)])
def test_what_a_chunk_takes(codec: str, ratio: float) -> None:
    """What an operator trades accuracy for: of a bf16 cache with heads of 64, 53% of the bytes."""
    shapes = codecs.specs(codec, 30, 256, 3, 64, torch.bfloat16)
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())
    assert size == ratio * 2 * 30 * 256 * 192 * 2


# --- never exact ---


@pytest.mark.parametrize("codec", LOSSY)
def test_an_exact_piece_has_no_use_for_a_lossy_chunk(store: LMCacheStore, codec: str) -> None:
    """Whatever a record of another node claims: exact is bit for bit."""
    keep(store, *chunk(codec))
    with ExitStack() as leases:
        assert fetch_root(store, piece(exact=True), CPU, leases) is None
        assert fetch_root(store, piece(exact=False), CPU, leases) is not None


def layout_of(codec: str, tokens: np.ndarray, plan: LabelledPlan | None = None) -> CaptureLayout:
    keys, plan = KeySpace("model"), plan or LabelledPlan()
    return lay_out(
        plan,
        tokens,
        prompt_tokens=len(tokens),
        accepted=plan.first_approximate is not None,
        tag=plan_tag(plan, lambda edge: 1),
        codec=codec,
        base_key=keys.base,
        delta_key=keys.delta,
    )


def words(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(100, 40_000, n).astype(np.int32)


def test_codecs_have_keys_of_their_own_and_only_raw_is_exact() -> None:
    """Two servers of one fleet with different settings, or one before and after a change, read each other's store."""
    layouts = {codec: layout_of(codec, words(600)) for codec in codecs.CODECS}
    for codec, layout in layouts.items():
        assert all(isinstance(w, ChunkWrite) and w.codec == codec for w in layout.writes)
        assert {p.exact for p in layout.pieces} == {codec == "raw"}
        assert [p.chunk for p in layout.pieces] == [w.key for w in layout.writes]
    keys = [w.key for layout in layouts.values() for w in layout.writes]
    assert len(set(keys)) == len(keys) == 9


def test_a_difference_to_a_lossy_chunk_is_another_entry_than_to_an_exact_one() -> None:
    """It holds what the codec lost as well: added to the exact root it would be wrong by that."""
    tokens, keys = words(400), []
    for codec in codecs.CODECS:
        root = layout_of(codec, words(400, seed=1)).pieces[0]
        pieces = (root.clip(0, 200).moved(100),)
        plan = LabelledPlan((), (Lesson(100, 300, Edge("a", "b", 0), pieces, 0, 0, 0.0),))
        keys += [w.key for w in layout_of(codec, tokens, plan).writes if not isinstance(w, ChunkWrite)]
    assert len(set(keys)) == 3


@settings(max_examples=25, deadline=None)
@given(
    codec=st.sampled_from(codecs.CODECS),
    prefix=st.integers(64, 700),
    more=st.integers(1, 300),
    seed=st.integers(0, 9),
)
def test_a_stored_prefix_is_exact_only_if_its_codec_is(codec: str, prefix: int, more: int, seed: int) -> None:
    """One block that is served as exact and is not poisons every later request with the same prefix."""
    first = words(prefix, seed)
    layout = layout_of(codec, first)
    index, hints = RecordIndex(), Hints(agent="solver")
    index.add(Record(b"r", first, prefix, layout.pieces, layout.segments, "solver"))
    second = np.concatenate([first, words(more, seed + 100)])
    plan = Planner().plan(second, index.match(second, ""), hints, AgentRegistry(), lambda edge: 0)
    kinds = {s.kind for s in plan.spans}
    assert kinds == {SpanKind.EXACT if codec == "raw" else SpanKind.OWN}
    assert (plan.first_approximate is None) == (codec == "raw")
    # And so on: what is computed behind it is not exact either, and what is laid out of it says so.
    after = layout_of(codec, second, plan)
    assert all(p.exact == (codec == "raw") for p in after.pieces)


# --- differences ---


@pytest.mark.parametrize("codec", LOSSY)
def test_a_difference_makes_good_what_the_codec_of_its_root_lost(store: LMCacheStore, codec: str) -> None:
    """It is measured against the root as the store gives it: what is added, and what it is added to, must agree."""
    rope = RopeTable(10000.0 ** (-torch.arange(0, DIM, 2) / DIM), DIM)
    keep(store, *chunk(codec))
    run = HotRun(*cache(seed=1), 40)
    with ExitStack() as leases:
        root = fetch_root(store, piece(), CPU, leases)
        assert root is not None
        keep(store, named(*delta_factors(run, Stretch([root]), rope, rank=64)), {}, DELTA, EntryKind.DELTA)
        got = fetch(store, HOT, piece(4, 20, delta=DELTA, delta_row=4), CPU, leases)
        assert got is not None
        exact = cache()
        lost = max(float((x - y).abs().max()) for x, y in zip((root.k, root.v), exact, strict=True))
        assert lost > 5e-3  # measured: .016 (int8), .10 (fp8)
        for layer in range(LAYERS):
            for found, want in zip(got.free(rope, layer), free_of(run, rope, layer), strict=True):
                assert (found - want[4:20]).abs().max() < 1e-5  # kept whole in fp32: only roundings are left


# --- what is no chunk ---

BAD: list[tuple[str, dict[str, Any]]] = [
    ("raw", {"meta": {}}),
    ("raw", {"meta": {"position": -1}}),
    ("raw", {"meta": {"position": 1.0}}),
    ("raw", {"meta": {"position": "7"}}),
    ("raw", {"meta": {"position": codecs.MAX_POSITION - TOKENS + 1}}),
    ("raw", {"meta": {"position": 2**63}}),
    ("raw", {"meta": {"position": 7, "codec": "int8"}}),
    ("raw", {"meta": {"position": 7, "codec": "zstd"}}),
    ("raw", {"meta": {"position": 7, "codec": 0}}),
    ("raw", {"k": None}),
    ("raw", {"k": torch.zeros(LAYERS, TOKENS, CHANNELS, dtype=torch.int8)}),
    ("raw", {"k": torch.zeros(LAYERS, TOKENS, CHANNELS, dtype=torch.float64), "v": torch.zeros(1).double()}),
    ("raw", {"k": torch.zeros(LAYERS, TOKENS, CHANNELS, dtype=torch.bfloat16)}),
    ("raw", {"k": torch.zeros(LAYERS, TOKENS, CHANNELS + 1)}),
    ("raw", {"k": torch.zeros(LAYERS * TOKENS, CHANNELS), "v": torch.zeros(LAYERS * TOKENS, CHANNELS)}),
    ("raw", {"k": torch.zeros(()), "v": torch.zeros(())}),
    ("raw", {"k": torch.zeros(0, TOKENS, CHANNELS), "v": torch.zeros(0, TOKENS, CHANNELS)}),
    ("raw", {"k": torch.zeros(LAYERS, TOKENS, 0), "v": torch.zeros(LAYERS, TOKENS, 0)}),
    ("raw", {"k": torch.full((LAYERS, TOKENS, CHANNELS), float("nan"))}),
    ("raw", {"v": torch.full((LAYERS, TOKENS, CHANNELS), float("inf"))}),
    ("raw", {"more": torch.zeros(3)}),
    ("int8", {"meta": {"position": 7}}),
    ("int8", {"meta": {"position": 7, "codec": "fp8", "heads": HEADS, "dtype": "float32"}}),
    ("int8", {"meta": {"position": 7, "codec": "raw", "heads": HEADS, "dtype": "float32"}}),
    ("int8", {"meta": {"position": 7, "codec": "int8", "heads": HEADS, "dtype": "int8"}}),
    ("int8", {"meta": {"position": 7, "codec": "int8", "heads": HEADS, "dtype": 32}}),
    ("int8", {"meta": {"position": 7, "codec": "int8", "heads": 0, "dtype": "float32"}}),
    ("int8", {"meta": {"position": 7, "codec": "int8", "heads": -2, "dtype": "float32"}}),
    ("int8", {"meta": {"position": 7, "codec": "int8", "heads": 4, "dtype": "float32"}}),
    ("int8", {"meta": {"position": 7, "codec": "int8", "heads": 5, "dtype": "float32"}}),
    ("int8", {"meta": {"position": 7, "codec": "int8", "heads": 2.0, "dtype": "float32"}}),
    ("int8", {"k.scale": None}),
    ("int8", {"k.scale": torch.ones(LAYERS, TOKENS, HEADS, dtype=torch.float64)}),
    ("int8", {"k.scale": torch.ones(LAYERS, TOKENS, HEADS + 1)}),
    ("int8", {"v.scale": torch.full((LAYERS, TOKENS, HEADS), float("nan"))}),
    ("int8", {"v.scale": torch.full((LAYERS, TOKENS, HEADS), -1.0)}),
    ("int8", {"more": torch.zeros(3)}),
    ("fp8", {"k": torch.full((LAYERS, TOKENS, CHANNELS), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)}),
    ("fp8", {"v": torch.full((LAYERS, TOKENS, CHANNELS), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn)}),
    ("fp8", {"k": torch.zeros(LAYERS, TOKENS, CHANNELS, dtype=torch.int8)}),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "changes"), BAD, ids=[f"{c}-{','.join(x)}-{i}" for i, (c, x) in enumerate(BAD)])
def test_a_whole_entry_that_is_no_chunk_is_a_miss(store: LMCacheStore, codec: str, changes: dict[str, Any]) -> None:
    """Checksums say that the bytes are the writer's, not that the writer was right. A miss once, and not for ever."""
    tensors, meta = chunk(codec)
    meta = changes.get("meta", meta)
    tensors = {name: t for name, t in (tensors | changes).items() if name != "meta" and t is not None}
    with pytest.raises(EntryError):
        codecs.read(tensors, meta, 0, TOKENS)
    keep(store, tensors, meta)
    with ExitStack() as leases:
        assert fetch_root(store, piece(), CPU, leases) is None
    assert not store.contains(CHUNK)


@pytest.mark.parametrize("codec", codecs.CODECS)
@pytest.mark.parametrize("rows", [(-1, 3), (0, 0), (3, 2), (0, TOKENS + 1), (TOKENS, TOKENS + 1), (2**62, 2**62 + 1)])
def test_rows_that_a_chunk_does_not_have_are_a_miss(codec: str, rows: tuple[int, int]) -> None:
    """A slice that is silently shorter is another stretch's cache."""
    assert codecs.read(*chunk(codec), *rows) is None


@pytest.mark.parametrize("codec", LOSSY)
def test_a_chunk_that_was_captured_with_an_overflow_is_a_miss(codec: str) -> None:
    """What the model cannot stand for is better computed again."""
    k, v = cache()
    k[1, 3, 5] = float("inf")
    tensors, meta = chunk(codec)
    codecs.write(codec, k, v, HEADS, tensors)
    with pytest.raises(EntryError, match="not finite"):
        codecs.read(tensors, meta, 0, TOKENS)
    assert codecs.read(tensors, meta, 4, TOKENS) is not None, "other rows are what they were"


@settings(max_examples=60, deadline=None)
@given(
    codec=st.sampled_from(LOSSY),
    scale=st.floats(0, float(np.finfo(np.float32).max), width=32),
    code=st.integers(0, 255),
    dtype=st.sampled_from(DTYPES),
)
def test_whatever_codes_and_scales_say_what_is_read_is_finite(
    codec: str, scale: float, code: int, dtype: torch.dtype
) -> None:
    """An infinity in one token's key or value makes NaN of a whole answer."""
    tensors, meta = chunk(codec, dtype)
    tensors["k"].view(torch.uint8).fill_(code)
    tensors["k.scale"].fill_(scale)
    try:
        got = codecs.read(tensors, meta, 0, TOKENS)
    except EntryError:
        assert codec == "fp8"
        assert code & 0x7F == 0x7F
        return
    assert got is not None
    assert torch.isfinite(got.k).all()


def geometry(layers: int = LAYERS, dim: int = DIM, dtype: str = "float32") -> ModelGeometry:
    return ModelGeometry(layers, HEADS, dim, dtype, RopeSpec("default", 1e4, dim, dim, False), "f")


def test_a_chunk_of_other_sizes_than_the_models_is_a_miss(store: LMCacheStore) -> None:
    """Of fewer layers, it would leave what another request had in the rest of them."""
    keep(store, *chunk("raw"))
    with ExitStack() as leases:
        assert fetch(store, HOT, piece(exact=True), CPU, leases, geometry()) is not None
        for other in (geometry(layers=4), geometry(dim=32), geometry(dtype="bfloat16")):
            assert fetch(store, HOT, piece(exact=True), CPU, leases, other) is None


def test_chunks_of_different_sizes_do_not_make_one_run(store: LMCacheStore) -> None:
    """Nothing could be computed from them together."""
    keep(store, *chunk("raw"))
    k, v = cache(torch.bfloat16)
    keep(store, {"k": k, "v": v}, {"position": 0}, b"e" * 32)
    second = Piece(TOKENS, 2 * TOKENS, b"e" * 32, 0)
    with ExitStack() as leases:
        assert fetch_all(store, HOT, [piece(exact=True), second], CPU, leases) is second


# --- the setting ---


class Paged:
    """Stands in for an engine's paged cache, which needs an engine."""

    dtype, device = torch.float32, CPU

    def read(self, block_ids: Any, start: int, end: int, k: Tensor, v: Tensor) -> None:
        for to, x in zip((k, v), cache(), strict=True):
            to.copy_(x[:, start:end])


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_the_setting_reaches_what_is_written(store: LMCacheStore, codec: str) -> None:
    """A setting without an effect costs a server the memory that its operator meant to save."""
    from lmcache_kvcmas.connectors.capturer import Capturer
    from lmcache_kvcmas.connectors.messages import Save

    chosen = Settings.from_extra_config({"kvcmas.base_codec": codec}).base_codec
    layout = layout_of(chosen, words(TOKENS))
    capturer = Capturer(store, HOT, None, Paged(), geometry(), Counter())  # type: ignore[arg-type]
    capturer.save(Save("r", "", (0,), layout.writes, (), False))
    assert not capturer.take_lost()
    (p,) = layout.pieces
    with ExitStack() as leases:
        lease = leases.enter_context(store.get(p.chunk, EntryKind.BASE))
        assert codecs.codec_of(lease.meta) == codec
        got = fetch_root(store, p, CPU, leases)
        assert got is not None
        assert torch.equal(got.k, cache()[0]) == (codec == "raw")
