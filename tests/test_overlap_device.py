"""Law: what crosses to a device band by band equals copying whole chunks and stitching them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout
from kvcache_rag.kv.rotary import NO_ROTATION, Rotation
from kvcache_rag.models.rotation import FrequencySet, LayerGroup, LayerKind, ModelLayout
from kvcache_rag.stitching import overlap
from kvcache_rag.stitching.overlap import cross
from kvcache_rag.stitching.stitch import stitch
from kvcache_rag.stores import device as layered
from tests.chunks import empty_chunk, flat, same
from tests.lanes import LateLane

if TYPE_CHECKING:
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.kv.rotary import StoredPosition

PREFIX, CHUNKS = 3, (5, 1, 8)
_HALF = Rotation("half", 0, 8, 0)
_NEIGHBOURS = Rotation("interleaved", 2, 4, 1, reverse=True)
SHAPES = {
    "one": (LayerGroup(GroupLayout((0, 1, 2), (2, 8), (2, 8)), None, _HALF, NO_ROTATION),),
    "mla": (
        LayerGroup(GroupLayout((0, 1), (1, 24), (1, 6)), None, NO_ROTATION, _NEIGHBOURS),
    ),
    "mixed": (
        LayerGroup(GroupLayout((0, 2), (2, 8), (2, 8)), None, _HALF, NO_ROTATION),
        LayerGroup(GroupLayout((1, 3, 4), (1, 8), (1, 8)), 4, _NEIGHBOURS, NO_ROTATION),
        LayerGroup(GroupLayout((5,), (4, 4), (2, 4)), None, NO_ROTATION, NO_ROTATION),
    ),
}  # fmt: skip


def layout_of(name: str, immovable: str = "") -> ModelLayout:
    """A model's layout with two sets of frequencies."""
    sets = [torch.tensor([1.0, 0.3, 0.1, 0.01]), torch.tensor([0.7, 0.05])]
    frequencies = tuple(FrequencySet(str(len(one)), lambda _, one=one: one) for one in sets)
    kinds = (LayerKind(),) * sum(len(group.layout.layers) for group in SHAPES[name])
    return ModelLayout(SHAPES[name], kinds, frequencies, torch.float32, 0.0, immovable)


def prompt(layout: ChunkLayout) -> tuple[list[ChunkKV], ChunkKV]:
    """Prefix and chunks, and a buffer for them with a gap on either side."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for start, tokens in [(0, PREFIX), *((PREFIX, tokens) for tokens in CHUNKS)]:
        part = empty_chunk(tokens, layout, start)
        for tensor in flat(part):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        part.tokens.copy_(torch.randint(0, 99, (tokens,), generator=generator))
        parts.append(part)
    return parts, empty_chunk(1 + PREFIX + sum(CHUNKS) + 2, layout)


def places(large: ChunkKV, parts: list[ChunkKV]) -> list[ChunkKV]:
    """Where each part goes."""
    found, begin = [], 1
    for part in parts:
        tensors = tuple(
            tuple(tensor.narrow(-2, begin, len(part)) for tensor in group)
            for group in large.tensors
        )
        found.append(ChunkKV(large.layout, torch.zeros_like(part.tokens), part.start, tensors))
        begin += len(part)
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("there", [(), (0,), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("stored", ["local", "raw"])
@pytest.mark.parametrize(("scheme", "adjacent"), [("reordered", False), ("composite", True)])
@pytest.mark.parametrize("name", SHAPES)
def test_crossing_equals_copying_and_stitching(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    scheme: PositionScheme,
    adjacent: bool,
    stored: StoredPosition,
    there: tuple[int, ...],
    late: bool,
) -> None:
    layout = layout_of(name)
    parts, expected = prompt(layout.chunk_layout)
    _, large = prompt(layout.chunk_layout)
    lane = LateLane()
    if late:
        for module in (overlap, layered):
            monkeypatch.setattr(module, "lane_to", lambda device: lane)
    plain, ours = places(expected, parts), places(large, parts)
    for part, place in zip(parts, plain, strict=True):
        place.copy_from(part)
        place.tokens.copy_(part.tokens)
    stitch(layout, plain, scheme, stored, adjacent=adjacent)

    for index in there:
        ours[index].copy_from(parts[index])
        ours[index].tokens.copy_(parts[index].tokens)
    sources = [None if index in there else part for index, part in enumerate(parts)]
    arrivals = cross(layout, sources, ours, scheme, stored, adjacent=adjacent)
    for layer in range(len(layout.kinds)):
        arrivals.wait(layer)
        for group, shape in enumerate(layout.groups):
            if layer in shape.layout.layers:
                place = shape.layout.layers.index(layer)
                for one, other in ((large.keys, expected.keys), (large.values, expected.values)):
                    assert torch.equal(one(group)[place], other(group)[place])
    assert all(same(one, other) for one, other in zip(ours, plain, strict=True))
    assert same(large, expected)
    assert bool(lane.sent) == late


def test_keys_that_cannot_move_are_refused() -> None:
    layout = layout_of("one", "its keys cannot be moved")
    parts, large = prompt(layout.chunk_layout)
    with pytest.raises(UnsupportedModelError):
        cross(layout, parts, places(large, parts), "reordered")
    ours = places(large, parts)
    cross(layout, parts, ours, "composite").wait(2)
    assert all(same(one, other) for one, other in zip(ours, parts, strict=True))
