"""An engine whose chunks cross late answers as one that copies and stitches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import access
import pytest
import torch
from zoo import build, byte_tokenizer

from kvcache_rag import DiskStore, Engine, MemoryStore, PromptTemplate, Reuse, TieredStore
from kvcache_rag.stitching import loader, overlap
from kvcache_rag.stores import device as layered
from kvcache_rag.stores import device as transfer
from tests.lanes import Elsewhere, LateLane

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.stores import ChunkStore

TEXTS = ["The lamp is in the box.", "Anna is in Paris.", "The price of the lamp is 12 euros."]
QUESTION = "Where is the lamp?"


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    """Main memory as if it were a device's, to which everything comes late."""
    late = LateLane()
    for module in (overlap, layered, transfer):
        monkeypatch.setattr(module, "lane_to", lambda device: late)
    monkeypatch.setattr(loader, "in_main_memory", lambda chunk: False)
    return late


def engine_of(store: ChunkStore) -> Engine:
    return Engine.from_pretrained("tiny", store=store, rotation="copied", device="cpu")


def stores(path: Path) -> dict[str, ChunkStore]:
    """Kinds of stores."""
    return {
        "memory": MemoryStore(),
        "disk": DiskStore(path / "a", durable=False, codec=Elsewhere()),
        "tiers": TieredStore(MemoryStore(), DiskStore(path / "b", durable=False)),
    }


@pytest.mark.parametrize("kind", ["memory", "disk", "tiers"])
def test_late_chunks_give_the_same_answers(tmp_path: Path, lane: LateLane, kind: str) -> None:
    with pytest.MonkeyPatch.context() as plainly:
        plainly.setattr(loader, "in_main_memory", transfer.in_main_memory)
        plain = engine_of(MemoryStore())
        plain.add(TEXTS)
        logits = plain.logits(QUESTION, chunks=TEXTS[::-1])
        answer = plain.generate(QUESTION, chunks=TEXTS[::-1], policy=Reuse(), max_new_tokens=8)
    engine = engine_of(stores(tmp_path)[kind])
    engine.add(TEXTS[1:])  # the first one is missing at first
    before = len(lane.sent)
    for _ in range(2):
        assert torch.equal(engine.logits(QUESTION, chunks=TEXTS[::-1]), logits)
    found = engine.generate(QUESTION, chunks=TEXTS[::-1], policy=Reuse(), max_new_tokens=8)
    assert found.token_ids == answer.token_ids
    assert len(lane.sent) > before
    assert lane.done == len(lane.sent), "nothing is on its way any more"
    hits = {"memory": 3} if kind != "disk" else {"disk": 3}
    assert dict(found.metrics.hits) == hits


def test_layers_are_waited_for_one_after_another(lane: LateLane) -> None:
    engine = engine_of(MemoryStore())
    engine.add(TEXTS)
    engine.logits(QUESTION, chunks=TEXTS)
    order: list[int] = []
    wait = layered.LayerArrivals.wait

    def waiting(self: layered.LayerArrivals, layer: int) -> None:
        order.append(layer)
        wait(self, layer)

    with pytest.MonkeyPatch.context() as watched:
        watched.setattr(layered.LayerArrivals, "wait", waiting)
        engine.logits(QUESTION, chunks=TEXTS)
    assert order == sorted(order)
    assert len(order) > 1


def test_batches_are_complete_before_they_begin(lane: LateLane) -> None:
    engine = engine_of(MemoryStore())
    questions = [(QUESTION, TEXTS), ("Where is Anna?", TEXTS[:2])]
    batch = engine.generate_batch(questions, policy=Reuse(), max_new_tokens=6)
    singles = [
        engine.generate(question, chunks=texts, policy=Reuse(), max_new_tokens=6)
        for question, texts in questions
    ]
    assert [one.token_ids for one in batch] == [one.token_ids for one in singles]
    assert lane.done == len(lane.sent)


def test_a_prompt_without_context_in_a_batch(lane: LateLane) -> None:
    template = PromptTemplate(system="", chunk_start="<d>", chunk_end="</d>")
    engine = Engine(
        build("llama"), byte_tokenizer(), template=template, store=MemoryStore(), rotation="copied"
    )
    assert not access.renderer(engine).prefix_ids
    batch = engine.generate_batch([(QUESTION, TEXTS), (QUESTION, [])], max_new_tokens=4)
    singles = [engine.generate(QUESTION, texts, max_new_tokens=4) for texts in (TEXTS, [])]
    assert [one.token_ids for one in batch] == [one.token_ids for one in singles]
