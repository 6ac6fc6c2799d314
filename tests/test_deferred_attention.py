"""Laws of attention over segments: the fast path equals the plain one, for any table and mask."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.kv.chunk import ChunkKV, GroupLayout
from kvcache_rag.kv.rotary import NO_ROTATION, Rotation, rotate
from kvcache_rag.models.deferred.attention import (
    deferred_attention,
    fast_attention,
    has_fast_path,
    plain_attention,
)
from kvcache_rag.models.deferred.cache import HeldSegments, LayerSegments, deferred_cache
from kvcache_rag.models.deferred.segments import LayerCall, Segment, SegmentTable
from kvcache_rag.models.rotation import FrequencySet, LayerGroup, LayerKind, ModelLayout

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
        self.table = SegmentTable.from_rows(self.layout, table, self.width - longest, keep)
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
        return LayerSegments(HeldSegments.from_table(self.table), 1, 1)

    def cached(self) -> tuple[Tensor, Tensor]:
        """The tail as it stands in a cache."""
        buffer = KVBuffer.allocate(self.layout.chunk_layout, 1, 8, "cpu")
        cache: Any = deferred_cache(HeldSegments.from_table(self.table), self.layout.kinds, buffer)
        keys, values = cache.update(self.key, self.value, 2)
        return keys, values

    def check(self, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        call = LayerCall(self.query, self.key, self.value, mask, 0.3, sinks)
        assert has_fast_path(call, self.table)
        plain, fast = plain_attention(call, self.layer), fast_attention(call, self.layer)
        assert (
            fast.shape == plain.shape == (len(self.asks), self.queries, self.query.shape[1], WIDTH)
        )
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


@pytest.mark.parametrize("rotation", ["half", "half reverse", "none", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_fast_is_plain_in_other_dtypes(dtype: torch.dtype, rotation: str) -> None:
    for batch, steps in itertools.product(BATCHES.values(), (0, 2)):
        for window in (None, 6):
            case = Case(ROTATIONS[rotation], *batch, window=window, steps=steps, dtype=dtype)
            case.check(case.mask)
            case.check(additive(case.mask, dtype), torch.linspace(-1.0, 2.0, HEADS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_of_the_query_for_each_of_the_keys_as_models_hand_it_over(
    dtype: torch.dtype,
) -> None:
    for batch in BATCHES.values():
        case = Case(ROTATIONS["half"], *batch, dtype=dtype)
        rows = len(case.asks)
        case.query = torch.randn(rows, case.queries, GROUPS, WIDTH).to(dtype).transpose(1, 2)
        case.check(case.mask)


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
                inv_freq = case.layout.frequencies[rotation.frequency].at_rest
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


def test_keys_without_segments_are_an_error_and_so_is_what_is_not_known() -> None:
    case, module = Case(ROTATIONS["half"], [[0]], [2]), torch.nn.Linear(1, 1)
    keys, values = case.cached()
    with pytest.raises(UnsupportedModelError, match="Linear passes softcap"):
        deferred_attention(module, case.query, keys, values, case.mask, softcap=30.0)
    case.cached()
    with pytest.raises(UnsupportedModelError, match="changes its keys between cache and att"):
        deferred_attention(module, case.query, keys.clone(), values, case.mask)


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
    for odd in (
        {"mask": by_head},
        {"value": case.value[..., :8]},
        {"query": case.query.bfloat16()},
    ):
        assert not has_fast_path(replace(call, **odd), case.table)
    keys, values = case.cached()
    module = torch.nn.Linear(1, 1)
    by_heads, _ = deferred_attention(module, case.query, keys, values, by_head, scaling=0.3)
    assert (by_heads - case.check(case.mask)).abs().max() < 2e-6
