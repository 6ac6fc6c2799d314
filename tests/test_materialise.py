"""Law: segments that are materialised are what copying chunks and rotating their keys gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import access
import pytest
import torch
from zoo import build, byte_tokenizer

from kvcache_rag import DiskStore, Engine, MemoryStore, PromptTemplate, Reuse, TieredStore
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout
from kvcache_rag.kv.rotary import NO_ROTATION, Rotation
from kvcache_rag.models.rotation import (
    FrequencySet,
    KeyRotation,
    LayerGroup,
    LayerKind,
    ModelLayout,
)
from kvcache_rag.stitching import stitch
from kvcache_rag.stitching.stitch import materialise, placed
from kvcache_rag.stores import device
from tests.chunks import empty_chunk, flat
from tests.lanes import Elsewhere, LateLane

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.kv.rotary import StoredPosition
    from kvcache_rag.stores import ChunkStore

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
TEXTS = ["The lamp is in the box.", "Anna is in Paris.", "The price of the lamp is 12 euros."]
QUESTION = "Where is the lamp?"


def layout_of(name: str, dtype: torch.dtype = torch.float32, immovable: str = "") -> ModelLayout:
    """A model's layout with two sets of frequencies."""
    sets = [torch.tensor([1.0, 0.3, 0.1, 0.01]), torch.tensor([0.7, 0.05])]
    frequencies = tuple(FrequencySet(str(len(one)), lambda _, one=one: one) for one in sets)
    kinds = (LayerKind(),) * sum(len(group.layout.layers) for group in SHAPES[name])
    return ModelLayout(SHAPES[name], kinds, frequencies, dtype, 0.0, immovable)


def random_parts(layout: ChunkLayout) -> list[ChunkKV]:
    """Prefix and chunks."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for start, tokens in [(0, PREFIX), *((PREFIX, tokens) for tokens in CHUNKS)]:
        part = empty_chunk(tokens, layout, start)
        for tensor in flat(part):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        part.tokens.copy_(torch.randint(0, 99, (tokens,), generator=generator))
        parts.append(part)
    return parts


def plainly(
    layout: ModelLayout,
    parts: list[ChunkKV],
    buffer: KVBuffer,
    scheme: PositionScheme,
    stored: StoredPosition,
    adjacent: bool,
) -> None:
    """The specification: every part is copied, then rotated by itself."""
    place = 0
    # Composite chunks stand at their own positions, all moved up by what they overlap.
    gap = sum(map(len, parts)) - (PREFIX + max(CHUNKS)) if adjacent else 0
    for part in parts:
        steps = torch.arange(len(part))
        old = torch.zeros_like(steps) if stored == "raw" else part.start + steps
        new = place + steps if scheme == "reordered" else part.start + gap + steps
        stop = place + len(part)
        view = buffer.view(0, place, stop, local_start=part.start, tokens=part.tokens)
        view.copy_from(part)
        if not torch.equal(old, new):
            KeyRotation.from_positions(layout, old, new, torch.device("cpu")).rotate(view)
        place = stop


@pytest.fixture(params=["main memory", "late"])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LateLane | None:
    """Main memory as it is, and as if it were a device's, to which everything comes late."""
    if request.param == "main memory":
        return None
    late = LateLane()
    monkeypatch.setattr(device, "lane_to", lambda device: late)
    monkeypatch.setattr(stitch, "in_main_memory", lambda chunk: False)
    return late


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("there", [(), (0,), (0, 2), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("stored", ["local", "raw"])
@pytest.mark.parametrize(("scheme", "adjacent"), [("reordered", False), ("composite", True)])
@pytest.mark.parametrize("name", SHAPES)
def test_law_materialised_is_copied_and_rotated(
    name: str,
    scheme: PositionScheme,
    adjacent: bool,
    stored: StoredPosition,
    there: tuple[int, ...],
    dtype: torch.dtype,
    lane: LateLane | None,
) -> None:
    """Bit for bit, whatever part of it was read into its place."""
    layout = layout_of(name, dtype)
    parts = random_parts(layout.chunk_layout)
    large, expected = (KVBuffer.allocate(layout.chunk_layout, 1, 20, "cpu") for _ in range(2))
    plainly(layout, parts, expected, scheme, stored, adjacent)
    segments = placed(parts, scheme, adjacent=adjacent)
    members = list(parts)
    for index in there:
        one, part = segments[index], parts[index]
        members[index] = large.view(
            0, one.column, one.stop, local_start=part.start, tokens=part.tokens
        )
        members[index].copy_from(part)
    before = [[tensor.clone() for tensor in flat(part)] for part in parts]
    materialise(layout, placed(members, scheme, adjacent=adjacent), large, stored)
    for mine, theirs in zip(large.tensors, expected.tensors, strict=True):
        for one_tensor, other in zip(mine, theirs, strict=True):
            assert torch.equal(one_tensor, other)
    for part, kept in zip(parts, before, strict=True):
        assert all(map(torch.equal, flat(part), kept)), "what is shared is never written to"
    assert lane is None or (lane.sent and lane.done == len(lane.sent))


def test_keys_that_cannot_move_are_refused_where_they_would_have_to() -> None:
    layout = layout_of("one", immovable="its keys cannot be moved")
    parts = random_parts(layout.chunk_layout)
    buffer = KVBuffer.allocate(layout.chunk_layout, 1, 20, "cpu")
    with pytest.raises(UnsupportedModelError, match="cannot be moved"):
        materialise(layout, placed(parts, "reordered"), buffer)
    materialise(layout, placed(parts, "composite"), buffer)
    found = buffer.view(0, 3, 8, local_start=3, tokens=parts[1].tokens)
    assert all(map(torch.equal, flat(found), flat(parts[1])))


def stores(path: Path) -> dict[str, ChunkStore]:
    """Kinds of stores."""
    return {
        "memory": MemoryStore(),
        "disk": DiskStore(path / "a", durable=False, codec=Elsewhere()),
        "tiers": TieredStore(MemoryStore(), DiskStore(path / "b", durable=False)),
    }


@pytest.mark.parametrize("kind", ["memory", "disk", "tiers"])
def test_answers_are_the_same_wherever_chunks_come_from(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Engine.from_pretrained("tiny", store=MemoryStore(), device="cpu")
    plain.add(TEXTS)
    logits = plain.logits(QUESTION, chunks=TEXTS[::-1])
    answer = plain.generate(QUESTION, chunks=TEXTS[::-1], policy=Reuse(), max_new_tokens=8)
    late = LateLane()
    monkeypatch.setattr(device, "lane_to", lambda device: late)
    monkeypatch.setattr(stitch, "in_main_memory", lambda chunk: False)
    engine = Engine.from_pretrained("tiny", store=stores(tmp_path)[kind], device="cpu")
    engine.add(TEXTS[1:])  # the first one is missing at first
    for _ in range(2):
        assert torch.equal(engine.logits(QUESTION, chunks=TEXTS[::-1]), logits)
    found = engine.generate(QUESTION, chunks=TEXTS[::-1], policy=Reuse(), max_new_tokens=8)
    assert found.token_ids == answer.token_ids
    assert late.sent
    assert late.done == len(late.sent), "nothing is on its way any more"
    assert dict(found.metrics.hits) == ({"disk": 3} if kind == "disk" else {"memory": 3})


def test_a_prompt_without_context_in_a_batch() -> None:
    template = PromptTemplate(system="", chunk_start="<d>", chunk_end="</d>")
    engine = Engine(build("llama"), byte_tokenizer(), template=template, store=MemoryStore())
    assert not access.renderer(engine).prefix_ids
    batch = engine.generate_batch([(QUESTION, TEXTS), (QUESTION, [])], max_new_tokens=4)
    singles = [engine.generate(QUESTION, texts, max_new_tokens=4) for texts in (TEXTS, [])]
    assert [one.token_ids for one in batch] == [one.token_ids for one in singles]
