"""Chunks whose keys are kept at position 0 answer as chunks whose keys stand where they were.

Errors are the largest difference of logits over the standard deviation of the reference.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import access
import pytest
import torch
from laws import QUESTION, TEMPLATE, error, refused
from zoo import FAMILIES, build, byte_tokenizer

from kvcache_rag import DiskStore, Engine, MemoryStore, Reuse
from kvcache_rag.codecs import Int4, Int8, Native
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.kv.rotary import rotate
from kvcache_rag.models.rotation import unrotated
from kvcache_rag.stores import TieredStore
from tests.contracts import flat

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from kvcache_rag.codecs import Codec

TOLERANCE = 1e-4
TEXTS = ["abc dea hgfe cab dh fa cbaz", "bb cadf ehgb a faa ch  edbhaf dcbz", "gh facb eez"]


@dataclass(frozen=True)
class RawNative(Native):
    """Un-rotated keys, and nothing else: what is left of a quantising codec without quantising."""

    name: ClassVar[str] = "raw-native"
    raw_keys: ClassVar[bool] = True


class RawMemory(MemoryStore):
    """Chunks of `RawNative` in memory."""

    @property
    def codec(self) -> Codec:
        return RawNative()


def engine_over(model: Any, store: MemoryStore | DiskStore | TieredStore, **options: Any) -> Engine:
    return Engine(model, byte_tokenizer(), store=store, **{"template": TEMPLATE, **options})


@pytest.fixture(scope="module", params=list(FAMILIES))
def engines(request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
    """One model over chunks at their local positions, and over chunks at position 0."""
    model = build(request.param)
    return engine_over(model, MemoryStore()), engine_over(model, RawMemory())


@pytest.mark.parametrize("scheme", ["reordered", "composite"])
def test_logits_are_those_of_native(engines: tuple[Engine, Engine], scheme: Any) -> None:
    native, raw = engines
    policy = Reuse(positions=scheme)
    if refused(raw, policy):
        return
    reference = native.logits(QUESTION, TEXTS, policy=policy)
    first = raw.logits(QUESTION, TEXTS, policy=policy)  # computed on the spot, or loaded
    assert error(first, reference) < TOLERANCE
    again = raw.logits(QUESTION, TEXTS, policy=policy)  # loaded
    assert torch.equal(first, again), "a stored chunk was changed by using it"
    found, reference = (
        one.logits(QUESTION, [TEXTS[2], TEXTS[0], TEXTS[2]], policy=policy) for one in (raw, native)
    )
    assert error(found, reference) < TOLERANCE


def test_what_is_stored_stands_at_position_0(engines: tuple[Engine, Engine]) -> None:
    native, raw = engines
    assert native.spec != raw.spec
    layout = access.adapter(native).measured
    local, moved = (
        engine.store.get(engine.add(TEXTS[:1])[0], layout.chunk_layout).chunk for engine in engines
    )
    steps = torch.arange(len(local))
    for index, group in enumerate(layout.groups):
        for slot, rotation in (
            (ChunkKV.keys, group.key_rotation),
            (ChunkKV.values, group.value_rotation),
        ):
            turned = rotation.style != "none"
            frequencies = (
                layout.frequencies[rotation.frequency].at_rest if turned else torch.zeros(0)
            )
            wanted = rotate(
                slot(local, index), rotation, frequencies, local.start + steps, 0 * steps
            )
            assert torch.equal(slot(moved, index), wanted)
            assert torch.equal(slot(moved, index), slot(local, index)) != turned


def test_turning_back_copies() -> None:
    engine = engine_over(build("qwen2"), MemoryStore())
    layout = access.adapter(engine).measured
    chunk = engine.store.get(engine.add(TEXTS[:1])[0], layout.chunk_layout).chunk
    before = [tensor.clone() for tensor in flat(chunk)]
    turned = unrotated(layout, chunk)
    assert all(map(torch.equal, flat(chunk), before))
    assert not torch.equal(turned.keys(0), chunk.keys(0))


def disk(path: Path, codec: Codec) -> DiskStore:
    return DiskStore(path / codec.name, durable=False, codec=codec)


@pytest.mark.parametrize("system", ["", TEMPLATE.system])
def test_memory_in_front_keeps_the_same_form(tmp_path: Path, system: str) -> None:
    model = build("qwen2")
    template = dataclasses.replace(TEMPLATE, system=system)
    native = engine_over(model, MemoryStore(), template=template)
    memory = MemoryStore()
    raw, later = (
        engine_over(model, TieredStore(first, disk(tmp_path, RawNative())), template=template)
        for first in (memory, MemoryStore())
    )
    reference = native.logits(QUESTION, TEXTS)
    raw.add(TEXTS)
    for engine in (raw, later, later):  # from memory, from disk, promoted
        assert error(engine.logits(QUESTION, TEXTS), reference) < TOLERANCE
    assert memory.stats().hits == {"memory": 3}
    assert later.store.stats().hits == {"disk": 3 + bool(system), "memory": 3}


@pytest.mark.parametrize("name", ["gpt2", "hunyuan"])
def test_keys_that_cannot_move_are_stored_as_they_are(name: str, tmp_path: Path) -> None:
    model = build(name)
    native, raw = engine_over(model, MemoryStore()), engine_over(model, RawMemory())
    policy = Reuse(positions="composite")
    reference = native.logits(QUESTION, TEXTS[:1], policy=policy)
    assert torch.equal(raw.logits(QUESTION, TEXTS[:1], policy=policy), reference)
    assert torch.equal(raw.logits(QUESTION, TEXTS[:1], policy=policy), reference)
    coarse = engine_over(model, disk(tmp_path, Int8()))
    with pytest.warns(UserWarning, match="it answers by full prefill"):
        coarse.add(TEXTS)
    assert error(coarse.logits(QUESTION, TEXTS[:1], policy=policy), reference) < 0.2


def rms(found: Tensor, reference: Tensor) -> float:
    """Root mean square difference in standard deviations of the reference."""
    return float((found - reference).pow(2).mean().sqrt() / reference.std())


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_quantised_chunks_answer_nearly_the_same(name: str, tmp_path: Path) -> None:
    model = build(name)
    reference = engine_over(model, MemoryStore()).logits(QUESTION, TEXTS)
    errors = []
    for codec in (Int8(), Int4()):
        engine_over(model, disk(tmp_path, codec)).add(TEXTS)
        reader = engine_over(model, disk(tmp_path, codec))  # its prefix comes from the store, too
        found = reader.logits(QUESTION, TEXTS)
        assert reader.store.stats().hits == {"disk": 4}
        assert torch.equal(reader.logits(QUESTION, TEXTS), found)
        errors.append(rms(found, reference))
    assert 0 < errors[0] < 0.05
    assert 5 * errors[0] < errors[1] < 0.5
