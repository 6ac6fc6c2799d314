"""Layers that cross one after another are there when the forward pass asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.stores import device as layered
from kvcache_rag.stores.device import deliver_layers
from tests.chunks import LAYOUTS, empty_chunk, flat, make_chunk, same, window
from tests.lanes import LateLane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout

TOKENS = (5, 1, 7)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    late = LateLane()
    monkeypatch.setattr(layered, "lane_to", lambda device: late)
    return late


def prompt(layout: ChunkLayout) -> tuple[ChunkKV, list[ChunkKV], list[ChunkKV]]:
    """A buffer, some chunks, and their places in it."""
    large = empty_chunk(3 + sum(TOKENS), layout)
    begins = [2 + sum(TOKENS[:index]) for index in range(len(TOKENS))]
    chunks = [make_chunk(seed, tokens=tokens, layout=layout) for seed, tokens in enumerate(TOKENS)]
    return large, chunks, [window(large, *one) for one in zip(begins, TOKENS, strict=True)]


def layer_of(chunk: ChunkKV, layer: int) -> list[bytes]:
    """The bytes of one layer of the model."""
    for group, tensors in zip(chunk.layout.groups, chunk.tensors, strict=True):
        if layer in group.layers:
            place = group.layers.index(layer)
            rows = [tensor[place].contiguous().view(torch.uint8) for tensor in tensors]
            return [row.numpy().tobytes() for row in rows]
    raise KeyError(layer)


@pytest.mark.parametrize("bands", [1, 2, 3, 100])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layer_is_there_when_it_was_waited_for(lane: LateLane, name: str, bands: int) -> None:
    large, chunks, parts = prompt(LAYOUTS[name])
    arrivals = deliver_layers(chunks, parts, bands=bands)
    assert not any(bool(tensor.view(torch.uint8).any()) for tensor in flat(large)), "too early"
    layers = sorted(layer for group in LAYOUTS[name].groups for layer in group.layers)
    for layer in layers:
        arrivals.wait(layer)
        for chunk, part in zip(chunks, parts, strict=True):
            assert layer_of(part, layer) == layer_of(chunk, layer)
    assert all(same(part, chunk) for part, chunk in zip(parts, chunks, strict=True))
    assert len(lane.sent) == min(bands, len(layers))
    for tensor in flat(large):
        assert not tensor[..., :2, :].view(torch.uint8).any()
        assert not tensor[..., -1:, :].view(torch.uint8).any()


def test_a_layer_waits_for_its_own_band_only(lane: LateLane) -> None:
    layout = LAYOUTS["mixed-float32"]
    _, chunks, parts = prompt(layout)
    arrivals = deliver_layers(chunks, parts, bands=3)
    done = []
    for layer in (0, 1, 2, 2, 4, 5, 0):
        arrivals.wait(layer)
        done.append(lane.done)
    assert done == [1, 1, 2, 2, 3, 3, 3]


def test_keys_turn_behind_the_copies_of_their_band(lane: LateLane) -> None:
    layout = LAYOUTS["mixed-float32"]
    large, chunks, parts = prompt(layout)
    for chunk in chunks:
        for tensor in flat(chunk):
            tensor.fill_(1)
    turned: list[list[slice]] = []

    def turn(slices: Sequence[slice]) -> None:
        turned.append(list(slices))
        for group, where in enumerate(slices):
            for part in parts:
                part.keys(group)[where].mul_(2)

    arrivals = deliver_layers(chunks, parts, turn, bands=2)
    arrivals.wait(5)
    for group in range(len(layout.groups)):
        for part in parts:
            assert bool((part.keys(group) == 2).all())
            assert bool((part.values(group) == 1).all())
    # Groups hold layers (0, 2), (1,) and (3, 4, 5).
    assert turned == [
        [slice(0, 2), slice(0, 1), slice(0, 0)],
        [slice(2, 2), slice(1, 1), slice(0, 3)],
    ]
    assert not large.tensors[0][0][..., :2, :].any()


def test_a_chunk_that_is_let_go_of_still_arrives(lane: LateLane) -> None:
    _, chunks, parts = prompt(LAYOUTS["fused-bfloat16"])
    expected = [make_chunk(seed, tokens=tokens) for seed, tokens in enumerate(TOKENS)]
    arrivals = deliver_layers(chunks, parts)
    chunks.clear()
    del chunks
    arrivals.wait(2)
    assert all(same(part, chunk) for part, chunk in zip(parts, expected, strict=True))


def test_nothing_is_on_its_way_after_closing(lane: LateLane) -> None:
    _, chunks, parts = prompt(LAYOUTS["mixed-float32"])
    arrivals = deliver_layers(chunks, parts)
    arrivals.wait(0)
    arrivals.close()
    assert lane.done == len(lane.sent) == 6
    assert all(same(part, chunk) for part, chunk in zip(parts, chunks, strict=True))
    assert (arrivals.waited, arrivals.error) == (0.0, None)


def test_places_that_are_filled_already_are_only_turned(lane: LateLane) -> None:
    _, chunks, parts = prompt(LAYOUTS["fused-float32"])
    for part in parts:
        for tensor in flat(part):
            tensor.fill_(1)

    def turn(slices: Sequence[slice]) -> None:
        for part in parts:
            part.keys(0)[slices[0]].mul_(2)

    deliver_layers([], [], turn, others=parts).close()
    assert all(bool((part.keys(0) == 2).all()) for part in parts)
    with pytest.raises(InvalidInputError):
        deliver_layers(chunks, [], turn, others=parts)


def test_every_chunk_needs_a_place() -> None:
    _, chunks, parts = prompt(LAYOUTS["fused-bfloat16"])
    for some in ([], chunks[1:]):
        with pytest.raises(InvalidInputError, match="one place per chunk"):
            deliver_layers(some, parts[: len(some) and 3])


def test_at_once_without_streams_of_ours() -> None:
    _, chunks, parts = prompt(LAYOUTS["apart-float16"])
    deliver_layers(chunks, parts).wait(1)
    assert all(same(part, chunk) for part, chunk in zip(parts, chunks, strict=True))
