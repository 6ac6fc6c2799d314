"""Laws of attention over segments: the fast path equals the plain one, for any table and mask."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.kv.chunk import ChunkKV, GroupLayout
from kvcache_rag.kv.rotary import NO_ROTATION, Rotation, rotate
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.deferred.attention import (
    deferred_attention,
    fast_attention,
    has_fast_path,
    plain_attention,
)
from kvcache_rag.models.deferred.cache import HeldSegments, LayerSegments, deferred_cache
from kvcache_rag.models.deferred.segments import LayerCall, Segment, SegmentTable
from kvcache_rag.models.rotation import FrequencySet, LayerGroup, LayerKind, ModelLayout

if TYPE_CHECKING:
    from kvcache_rag.models.attention.few_queries import ChunkContext

WIDTH, GROUPS = 32, 2  # a width that the CPU's kernel for bfloat16 takes
HEADS = 6
TOLERANCE = {torch.float32: 4e-6, torch.float64: 4e-6, torch.bfloat16: 5e-2, torch.float16: 6e-3}
ROTATIONS = {
    "half": Rotation("half", 0, WIDTH, 0),
    "half reverse": Rotation("half", 0, WIDTH, 0, reverse=True),
    "half partial": Rotation("half", 4, 8, 1),
    "interleaved": Rotation("interleaved", 0, WIDTH, 0),
    "interleaved partial reverse": Rotation("interleaved", 0, 8, 1, reverse=True),
    "none": NO_ROTATION,
}


def make_layout(rotation: Rotation, dtype: torch.dtype = torch.float32) -> ModelLayout:
    shape = (GROUPS, WIDTH)
    frequencies = tuple(
        FrequencySet(
            str(dim), lambda _, dim=dim: 100.0 ** (-torch.arange(0, dim, 2).float() / dim), None
        )
        for dim in (WIDTH, 8)
    )
    return ModelLayout(
        groups=(
            LayerGroup(GroupLayout((0,), shape, shape), None, NO_ROTATION, NO_ROTATION),
            LayerGroup(GroupLayout((1, 2), shape, shape), None, rotation, NO_ROTATION),
        ),
        kinds=(LayerKind(),) * 3,
        frequencies=frequencies,
        dtype=dtype,
        residual=0.0,
    )


def make_chunk(layout: ModelLayout, tokens: int) -> ChunkKV:
    tensors = tuple(
        tuple(torch.randn(shape).to(layout.dtype) for shape in group.shapes(tokens))
        for group in layout.chunk_layout.groups
    )
    return ChunkKV(layout.chunk_layout, torch.arange(tokens, dtype=torch.int32), 0, tensors)


class Case:
    """A batch: which chunks stand where, how long the queries are, and the mask of the whole."""

    def __init__(
        self,
        rotation: Rotation,
        rows: list[list[int]],
        queries: list[int],
        *,
        window: int | None = None,
        steps: int = 0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        """Rows of numbers of chunks and the tokens of each row's query; `steps` decoded tokens."""
        torch.manual_seed(seed)
        self.layout = make_layout(rotation, dtype)
        sizes = [7, 5, 12, 1, 9]
        chunks = [make_chunk(self.layout, size) for size in sizes]
        contexts = [sum(sizes[number] for number in row) for row in rows]
        lengths = [context + query for context, query in zip(contexts, queries, strict=True)]
        self.width, longest = max(lengths), max(queries)
        table = []
        for row, length in zip(rows, lengths, strict=True):
            column, members = self.width - length, []
            for number in row:
                far = column - (self.width - length) - number  # any distance will do
                members.append(Segment(chunks[number], column, chunks[number].start + far))
                column += sizes[number]
            table.append(members)
        keep = [longest - query for query in queries]
        self.table = SegmentTable.of(self.layout, table, self.width - longest, keep)
        self.queries = longest if not steps else 1
        tail, count = longest + steps, len(rows)
        self.query = torch.randn(count, HEADS, self.queries, WIDTH).to(dtype)
        self.key, self.value = (
            torch.randn(count, GROUPS, tail + 3, WIDTH).to(dtype)[:, :, :tail] for _ in range(2)
        )
        total = self.table.tail + tail
        places = torch.arange(total - self.queries, total)
        columns = torch.arange(total)
        seen = columns <= places[:, None]
        if window is not None:
            seen = seen & (places[:, None] - columns < window)
        starts = torch.tensor([self.width - length for length in lengths])
        self.mask = (seen[None] & (columns >= starts[:, None])[:, None])[:, None]
        self.asks = (places - self.table.tail)[None] >= torch.tensor(keep)[:, None]

    @property
    def layer(self) -> LayerSegments:
        return LayerSegments(HeldSegments.of(self.table), 1, 1)

    def check(self, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        call = LayerCall(self.query, self.key, self.value, mask, 0.3, sinks)
        assert has_fast_path(call, self.table)
        plain, fast = plain_attention(call, self.layer), fast_attention(call, self.layer)
        assert fast.shape == plain.shape == (len(self.asks), self.queries, HEADS, WIDTH)
        assert fast.dtype == self.query.dtype
        assert bool(fast.isfinite().all())
        assert bool(plain.isfinite().all())
        error = (fast - plain).abs()[self.asks].max()
        assert error < TOLERANCE[self.query.dtype]
        assert plain[self.asks].std() > 0.05
        return plain


def additive(mask: Tensor, dtype: torch.dtype, lowest: float | None = None) -> Tensor:
    low = torch.finfo(dtype).min if lowest is None else lowest
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, low)


BATCHES: dict[str, tuple[list[list[int]], list[int]]] = {
    "one row": ([[0, 1, 2]], [4]),
    "a chunk twice": ([[0, 2, 1, 2, 3]], [3]),
    "no chunk": ([[]], [5]),
    "the same chunk at other columns": ([[0, 1, 2], [0, 2], [0, 4, 2, 1]], [4, 4, 4]),
    "queries of other lengths": ([[0, 1, 2], [0, 2, 3], [0]], [2, 6, 30]),
    "a row without context": ([[0, 1], []], [3, 5]),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("window", [None, 1, 9, 1000])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_fast_is_plain(rotation: str, batch: str, window: int | None, steps: int) -> None:
    case = Case(ROTATIONS[rotation], *BATCHES[batch], window=window, steps=steps)
    by_bool = case.check(case.mask)
    assert torch.equal(
        case.check(additive(case.mask, torch.float32))[case.asks], by_bool[case.asks]
    )
    case.check(additive(case.mask, torch.float32, -torch.inf))
    if window in (None, 1000) and bool(case.mask[:, 0, -1].all()):  # nothing but causality
        assert torch.equal(case.check(None)[case.asks], by_bool[case.asks])
    if bool((case.mask[0] == case.mask).all()):  # one mask for all rows
        case.check(case.mask[:1])


@pytest.mark.parametrize("seed", range(12))
def test_fast_is_plain_for_random_batches(seed: int) -> None:
    choose = random.Random(seed)
    rows = [
        [choose.randrange(5) for _ in range(choose.randrange(6))]
        for _ in range(choose.randrange(1, 6))
    ]
    queries = [choose.randrange(1, 20) for _ in rows]
    case = Case(
        ROTATIONS[choose.choice([*ROTATIONS])],
        rows,
        queries,
        window=choose.choice([None, 2, 6, 15, 31]),
        steps=choose.randrange(3),
        seed=seed,
    )
    case.check(case.mask, torch.randn(HEADS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_fast_is_plain_in_other_dtypes(dtype: torch.dtype) -> None:
    for batch, steps in itertools.product(BATCHES.values(), (0, 2)):
        for window in (None, 6):
            case = Case(ROTATIONS["half"], *batch, window=window, steps=steps, dtype=dtype)
            case.check(case.mask)
            case.check(additive(case.mask, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_of_the_query_for_each_of_the_keys_as_models_hand_it_over(
    dtype: torch.dtype,
) -> None:
    for batch in BATCHES.values():
        case = Case(ROTATIONS["half"], *batch, dtype=dtype)
        rows = len(case.asks)
        query = torch.randn(rows, case.queries, GROUPS, WIDTH).to(dtype).transpose(1, 2)
        call = LayerCall(query, case.key, case.value, case.mask, 0.3)
        error = fast_attention(call, case.layer) - plain_attention(call, case.layer)
        assert error.abs()[case.asks].max() < TOLERANCE[dtype]


def test_a_mask_that_adds_to_scores_adds_to_those_of_segments_too() -> None:
    case = Case(ROTATIONS["half"], *BATCHES["queries of other lengths"])
    added = additive(case.mask, torch.float32) + torch.randn(case.mask.shape)
    with_it = case.check(added)
    without = case.check(case.mask)
    assert (with_it - without).abs()[case.asks].max() > 0.1


def test_plain_is_attention_over_a_turned_copy() -> None:
    """The specification against stock attention over keys moved by `rotary.rotate`."""
    for rotation in ROTATIONS.values():
        case = Case(rotation, [[0, 1, 2]], [4])
        keys, values = [], []
        for one, far in zip(case.table.rows[0], (0, 7 - 1, 12 - 2), strict=True):
            here = torch.arange(len(one.chunk))
            turned = one.chunk.keys(1)[1]
            if rotation.style != "none":
                inv_freq = case.layout.frequencies[rotation.frequency].at_rest()
                turned = rotate(turned, rotation, inv_freq, here, here + far)
            keys.append(turned)
            values.append(one.chunk.values(1)[1])
        whole = [
            torch.cat([*parts, own[0]], 1)[None]
            for parts, own in ((keys, case.key), (values, case.value))
        ]
        stock = torch.nn.functional.scaled_dot_product_attention(
            case.query, *whole, attn_mask=case.mask, scale=0.3, enable_gqa=True
        )
        assert (case.check(case.mask) - stock.transpose(1, 2)).abs().max() < 1e-5
        moved = Case(rotation, [[0, 1, 2]], [4], seed=1)
        assert (moved.check(moved.mask) - stock.transpose(1, 2)).abs().max() > 0.1


def test_a_chunk_in_several_rows_is_read_once_and_a_hidden_one_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(ROTATIONS["half"], *BATCHES["the same chunk at other columns"])
    lengths = calls_of(case, case.mask, monkeypatch)
    assert sorted(lengths) == sorted([4, 7, 5, 12, 9]), "the tail and each chunk once"
    near = Case(ROTATIONS["half"], [[2, 0, 1, 4]], [3], window=8)
    # 3 queries and a window of 8: columns up to 7 before the first query's.
    assert calls_of(near, near.mask, monkeypatch) == [3, 7]


@pytest.mark.skipif(
    few_queries.library() is None, reason="no compiled kernel, or no CPU with AVX-512 for bfloat16"
)
@pytest.mark.parametrize("rotation", ["half", "half reverse", "none", "interleaved"])
def test_one_row_that_sees_all_of_its_chunks_takes_one_call(
    rotation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    kernel = few_queries.attend_behind

    def counted(chunks: ChunkContext, *rest: Any) -> Any:
        calls.append(chunks.tokens)
        return kernel(chunks, *rest)

    monkeypatch.setattr(few_queries, "attend_behind", counted)
    is_turned = rotation != "interleaved"
    rows, queries = [[0, 2, 1, 2, 3]], [3]
    for steps in (0, 3):
        case = Case(ROTATIONS[rotation], rows, queries, steps=steps, dtype=torch.bfloat16)
        for mask in (case.mask, None):
            case.check(mask)
            case.check(mask, torch.linspace(-1.0, 2.0, HEADS))
    assert calls == [7 + 12 + 5 + 12 + 1] * 8 * is_turned
    calls.clear()
    for row in (rows * 2, [[]]):  # more rows than one; nothing but the tail
        case = Case(ROTATIONS[rotation], row, queries * len(row), dtype=torch.bfloat16)
        case.check(case.mask)
    near = Case(ROTATIONS[rotation], rows, queries, window=8, dtype=torch.bfloat16)
    near.check(near.mask)
    assert not calls


def calls_of(case: Case, mask: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of keys in each call of the kernel."""
    lengths: list[int] = []
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def counted(query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
        lengths.append(key.shape[2])
        return kernel(query, key, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(
            torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", counted, raising=True
        )
        fast_attention(LayerCall(case.query, case.key, case.value, mask, 0.3), case.layer)
    return lengths


def test_the_cache_counts_its_segments_and_holds_the_tail_alone() -> None:
    case = Case(ROTATIONS["half"], [[0, 1, 2]], [4])
    buffer = KVBuffer.allocate(case.layout.chunk_layout, 1, 8, "cpu")
    held = HeldSegments.of(case.table)
    cache: Any = deferred_cache(held, case.layout.kinds, buffer)
    assert cache.get_seq_length() == 24
    assert cache.get_mask_sizes(4, 0) == (28, 0)
    keys, values = cache.update(case.key, case.value, 2)
    assert torch.equal(keys, case.key)
    assert torch.equal(values, case.value)
    assert keys.data_ptr() == buffer.slots()[2][0].data_ptr()
    assert cache.get_seq_length(2) == 28
    chunk = case.table.rows[0][1].chunk
    view = held.views[1][id(chunk)][0][1]
    assert view.data_ptr() == chunk.keys(1)[1].data_ptr()
    found, _ = deferred_attention(torch.nn.Linear(1, 1), case.query, keys, values, case.mask)
    call = LayerCall(case.query, keys, values, case.mask, WIDTH**-0.5)
    expected = plain_attention(call, case.layer)
    assert (found - expected).abs().max() < 2e-6


def test_keys_without_segments_are_an_error_and_so_is_what_is_not_known() -> None:
    case = Case(ROTATIONS["half"], [[0]], [2])
    module = torch.nn.Linear(1, 1)
    buffer = KVBuffer.allocate(case.layout.chunk_layout, 1, 8, "cpu")
    cache: Any = deferred_cache(HeldSegments.of(case.table), case.layout.kinds, buffer)
    keys, values = cache.update(case.key, case.value, 2)
    with pytest.raises(UnsupportedModelError, match="Linear passes softcap"):
        deferred_attention(module, case.query, keys, values, case.mask, softcap=30.0)
    cache.update(case.key, case.value, 1)
    with pytest.raises(UnsupportedModelError, match="changes its keys between cache and att"):
        deferred_attention(module, case.query, keys.clone(), values, case.mask)


def test_keys_of_another_cache_are_attended_to_plainly() -> None:
    case = Case(ROTATIONS["half"], [[0], [0]], [3, 3])
    found, _ = deferred_attention(torch.nn.Linear(1, 1), case.query, case.key, case.value, None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.query, case.key, case.value, is_causal=True, enable_gqa=True
    )
    assert (found - expected.transpose(1, 2)).abs().max() < 2e-6


def test_plans_do_not_grow_with_the_tail() -> None:
    """Rows as long as each other with queries of other lengths: without a mask, but not alike."""
    case = Case(ROTATIONS["half"], [[0, 1], [0]], [2, 7], steps=20)
    layer = case.layer
    for tail in range(8, 28):
        tensors = (case.query, case.key[:, :, :tail], case.value[:, :, :tail])
        call = LayerCall(*tensors, None, 0.3)
        assert (fast_attention(call, layer) - plain_attention(call, layer)).abs().max() < 2e-6
    assert len(layer.held.unmasked_plans) == 1


def test_odd_shapes_take_the_plain_path() -> None:
    case = Case(ROTATIONS["half"], [[0, 1]], [3])
    by_head = case.mask.expand(-1, HEADS, -1, -1)
    call = LayerCall(case.query, case.key, case.value, case.mask, 0.3)
    assert has_fast_path(call, case.table)
    assert not has_fast_path(replace(call, mask=by_head), case.table)
    assert not has_fast_path(replace(call, value=case.value[..., :8]), case.table)
    assert not has_fast_path(replace(call, query=case.query.bfloat16()), case.table)
    key = case.key.clone()
    buffer = KVBuffer.allocate(case.layout.chunk_layout, 1, 8, "cpu")
    cache: Any = deferred_cache(HeldSegments.of(case.table), case.layout.kinds, buffer)
    held, values = cache.update(key, case.value, 2)
    module = torch.nn.Linear(1, 1)
    by_heads, _ = deferred_attention(module, case.query, held, values, by_head, scaling=0.3)
    assert (by_heads - case.check(case.mask)).abs().max() < 2e-6
