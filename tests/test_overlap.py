"""Placing chunks layer by layer, beside the forward pass or before it, equals the plain path."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from zoo import build, byte_tokenizer

from kvcache_rag import DiskStore, Engine, MemoryStore, Reuse, TieredStore
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.kv.chunk import ChunkKey, ChunkKV
from kvcache_rag.stitching.costs import Costs
from kvcache_rag.stitching.loader import ContextLoader, OpenChunk
from kvcache_rag.stitching.overlap import Part, Placing, PlacingAhead
from kvcache_rag.stitching.stitch import stitch
from kvcache_rag.stores.base import ResidentChunk
from kvcache_rag.stores.disk.file import LayerFile
from tests.laws import QUESTION, TEMPLATE, TEXTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkLayout
    from kvcache_rag.stores import ChunkStore

# Half-split, windows, layers of two shapes, part of the columns, interleaved, MLA, sinks.
NAMES = ("llama", "qwen2 window", "gemma3", "gemma3n", "phi", "cohere", "deepseek_v3", "gpt_oss")


def make_engine(name: str, store: ChunkStore, dtype: torch.dtype = torch.float32) -> Engine:
    model = build(name) if dtype == torch.float32 else build(name).to(dtype)
    return Engine(model, byte_tokenizer(), template=TEMPLATE, store=store, rotation="copied")


@pytest.fixture(autouse=True)
def free_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading goes beside the model, also where these tests have one processor only."""
    count = torch.get_num_threads() + 1
    monkeypatch.setattr("kvcache_rag.stitching.loader._processors", lambda: count)


@pytest.fixture(params=["ahead", "before"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(ContextLoader, "pays_ahead", lambda *_: request.param == "ahead")
    return bool(request.param == "ahead")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContextLoader, "pays_ahead", lambda *_: True)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[PlacingAhead]:
    """What was loaded beside a forward pass."""
    found: list[PlacingAhead] = []
    start = PlacingAhead.start

    def noted(*arguments: Any) -> PlacingAhead | None:
        found.extend(filter(None, [begun := start(*arguments)]))
        return begun

    monkeypatch.setattr(PlacingAhead, "start", noted)
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def loaders() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "kvcache-rag-load"]


def plainly(engine: Engine) -> torch.Tensor:
    """Logits by the plain path alone: whole chunks, then `stitch`."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (MemoryStore, DiskStore, TieredStore):
            patch.setattr(kind, "reader", lambda *_: None)
        return engine.logits(QUESTION, TEXTS, policy=Reuse())


def random_chunk(
    layout: ChunkLayout, start: int, tokens: int, generator: torch.Generator
) -> ChunkKV:
    ids = torch.randint(0, 300, (tokens,), generator=generator, dtype=torch.int32)
    tensors = tuple(
        tuple(torch.randn(shape, generator=generator).to(layout.dtype) for shape in group)
        for group in (group.shapes(tokens) for group in layout.groups)
    )
    return ChunkKV(layout, ids, start, tensors)


def places_of(buffer: KVBuffer, chunks: list[ChunkKV]) -> list[ChunkKV]:
    """Views into the second row, from its fourth place on."""
    views, place = [], 3
    for chunk in chunks:
        stop = place + len(chunk)
        ids = torch.empty_like(chunk.tokens)
        views.append(buffer.view(1, place, stop, local_start=chunk.start, tokens=ids))
        place = stop
    return views


@pytest.mark.parametrize("place", ["disk", "memory", "tiers"])
@pytest.mark.parametrize("name", NAMES)
def test_law_answers_are_those_of_the_plain_path(
    tmp_path: Path, name: str, place: str, ahead: bool, started: list[PlacingAhead]
) -> None:
    stores: dict[str, Callable[[], ChunkStore]] = {
        "disk": lambda: DiskStore(tmp_path, durable=False),
        "memory": MemoryStore,
        "tiers": lambda: TieredStore(MemoryStore(), DiskStore(tmp_path, durable=False)),
    }
    engine = make_engine(name, stores[place]())
    engine.add(TEXTS)
    expected = plainly(engine)
    assert torch.equal(engine.logits(QUESTION, TEXTS, policy=Reuse()), expected)
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.store), "reader", lambda *_: None)
        assert engine.generate(QUESTION, TEXTS, max_new_tokens=6).token_ids == answer.token_ids
    is_layered = place != "disk" or len(access.chunk_layout(engine).names()) == 1
    assert bool(started) == (ahead and is_layered and (place, name) != ("disk", "deepseek_v3"))
    assert answer.metrics.misses == 0
    assert sum(answer.metrics.hits.values()) == len(TEXTS)
    parts = (answer.metrics.load, answer.metrics.stitch, answer.metrics.prefill)
    assert min(parts) >= 0
    assert sum(parts) <= answer.metrics.ttft + 1e-6
    assert not loaders()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", ["reordered", "composite"])
@pytest.mark.parametrize("stored", ["local", "raw"])
@pytest.mark.parametrize("name", ["llama", "gemma3n", "glm4", "deepseek_v3"])
def test_law_one_pass_changes_no_bit(
    name: str, stored: Any, scheme: Any, dtype: torch.dtype
) -> None:
    layout = replace(access.adapter(make_engine(name, MemoryStore())).measured, dtype=dtype)
    shapes = layout.chunk_layout
    generator = torch.Generator().manual_seed(3)
    chunks = [
        random_chunk(shapes, *sizes, generator) for sizes in ((0, 5), (5, 17), (5, 3), (5, 40))
    ]
    adjacent = scheme == "composite"
    found, expected = (KVBuffer.allocate(shapes, 2, 80, "cpu") for _ in range(2))
    views = places_of(expected, chunks)
    for view, chunk in zip(views, chunks, strict=True):
        view.copy_from(chunk)
    stitch(layout, views, scheme, stored, adjacent=adjacent)
    places = places_of(found, chunks)
    places[2].copy_from(chunks[2])  # one lies there already, as after reading a file
    readers = [ResidentChunk(chunk, "memory") for chunk in chunks]
    readers[2] = ResidentChunk(places[2], "memory")
    parts = [Part(one, place) for one, place in zip(readers, places, strict=True)]
    placing = Placing(layout, parts, scheme, stored, adjacent)
    for _, group, place in placing.order:
        placing.place(group, place)
    placing.finish()
    for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


def flipped(path: Path, back: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[-back] ^= 1
    path.write_bytes(raw)


def changed_in_place(path: Path, back: int) -> None:
    with path.open("r+b") as file:
        file.seek(-back, os.SEEK_END)
        file.write(bytes(100))


# At the first use of a layer: what happens to the file of the last chunk.
DAMAGE: dict[str, tuple[int, Callable[[Path], object]]] = {
    "a byte of the last layer": (-1, lambda path: flipped(path, 1 + 4 * 128)),
    "a byte of the ids": (-1, lambda path: flipped(path, 1)),
    "cut before": (-1, lambda path: os.truncate(path, path.stat().st_size - 100)),
    "cut midway": (2, lambda path: os.truncate(path, 8192)),
    "changed midway": (2, lambda path: changed_in_place(path, 1000)),
    "gone before": (-1, lambda path: path.unlink()),
    "gone midway": (2, lambda path: path.unlink()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_never_yields_a_token(
    tmp_path: Path, damage: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_engine("llama", MemoryStore()).generate(QUESTION, TEXTS, max_new_tokens=6)
    store = DiskStore(tmp_path, durable=False)
    engine = make_engine("llama", store)
    keys = engine.add(TEXTS)
    layer, harm = DAMAGE[damage]
    read = LayerFile.layer
    done: list[int] = []

    def harmed(self: LayerFile, group: int, place: int) -> None:
        if place == layer and not done:
            done.append(place)
            harm(store.path(keys[-1]))
        read(self, group, place)

    if layer < 0:
        harm(store.path(keys[-1]))
    else:
        monkeypatch.setattr(LayerFile, "layer", harmed)
    before = descriptors()
    pieces: list[str] = []
    stream = engine.stream(QUESTION, TEXTS, max_new_tokens=6)
    pieces.extend(stream)
    assert "".join(pieces) == expected.text
    assert bool(done) == (layer >= 0)
    stats = store.stats()
    is_read_on = damage == "gone midway"  # an open file stays
    assert stream.metrics.misses == (0 if is_read_on else 1)
    assert stats.corrupt == (0 if "gone" in damage else 1)
    assert len([*tmp_path.rglob("quarantine/*")]) == stats.corrupt
    again = engine.generate(QUESTION, TEXTS, max_new_tokens=6)
    assert again.token_ids == expected.token_ids
    if not is_read_on:
        assert again.metrics.misses == 0, "what was missing is stored anew"
    assert descriptors() == before
    assert not loaders()


def test_a_chunk_is_counted_once(tmp_path: Path, ahead: bool) -> None:
    for store in (MemoryStore(), DiskStore(tmp_path, durable=False)):
        engine = make_engine("llama", store)
        engine.add(TEXTS)
        engine.generate(QUESTION, TEXTS, max_new_tokens=1)
        before = store.stats()
        engine.generate(QUESTION, TEXTS, max_new_tokens=1)
        after = store.stats()
        assert after.hits[store.tier] - before.hits.get(store.tier, 0) == len(TEXTS)
        assert (after.misses, after.corrupt) == (before.misses, before.corrupt)
        assert after.bytes_read[store.tier] > before.bytes_read.get(store.tier, 0)


def test_one_chunk_twice_is_read_twice(tmp_path: Path, ahead: bool) -> None:
    engine = make_engine("llama", DiskStore(tmp_path, durable=False))
    engine.add(TEXTS)
    texts = [TEXTS[0], TEXTS[1], TEXTS[0]]
    found = engine.logits(QUESTION, texts, policy=Reuse())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskStore, "reader", lambda *_: None)
        assert torch.equal(found, engine.logits(QUESTION, texts, policy=Reuse()))


@pytest.mark.usefixtures("always")
def test_an_answer_that_fails_leaves_nothing_behind(
    tmp_path: Path, started: list[PlacingAhead]
) -> None:
    engine = make_engine("llama", DiskStore(tmp_path, durable=False))
    engine.add(TEXTS)
    engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    before = descriptors()

    def refuse(module: Any, arguments: Any) -> None:
        raise RuntimeError("no memory")

    hook = engine.model.model.layers[1].register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    hook.remove()
    assert len(started) == 2, "the failure was not that of loading: once is enough"
    assert not loaders()
    assert descriptors() == before
    cancelled = threading.Event()
    cancelled.set()
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=9, cancelled=cancelled)
    assert len(answer.token_ids) <= 1
    assert not loaders()
    assert descriptors() == before


@pytest.mark.usefixtures("always")
def test_a_failure_of_the_loader_is_answered_the_plain_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[PlacingAhead]
) -> None:
    engine = make_engine("llama", DiskStore(tmp_path, durable=False))
    engine.add(TEXTS)
    expected = plainly(engine)

    def broken(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Placing, "finish", broken)
    assert torch.equal(engine.logits(QUESTION, TEXTS, policy=Reuse()), expected)
    assert len(started) == 1
    assert not loaders()


@pytest.mark.usefixtures("always")
def test_no_layer_is_used_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("llama", DiskStore(tmp_path, durable=False))
    engine.add(TEXTS)
    expected = plainly(engine)
    place = Placing.place
    placed: list[int] = []

    def slowly(self: Placing, group: int, number: int) -> None:
        time.sleep(0.05)
        placed.append(number)
        place(self, group, number)

    monkeypatch.setattr(Placing, "place", slowly)
    entered: list[int] = []
    engine.model.model.layers[0].register_forward_hook(lambda *_: entered.append(len(placed)))
    assert torch.equal(engine.logits(QUESTION, TEXTS, policy=Reuse()), expected)
    assert placed == [0, 1, 2, 3]
    assert entered[0] < 4, "the first layer did not wait for the last one's context"


def test_loading_ahead_pays_where_it_takes_long_and_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = Costs()
    loader = ContextLoader(None, None, costs)  # type: ignore[arg-type]  # asked for nothing

    def opened(nbytes: int) -> list[OpenChunk]:
        reader = ResidentChunk.__new__(ResidentChunk)
        reader.tier, reader.nbytes = "disk", nbytes
        return [OpenChunk(ChunkKey("0" * 64, "0" * 64, "", 1, 0), reader, 0.0)]

    def free(threads: int, processors: int) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr("kvcache_rag.stitching.loader._processors", lambda: processors)

    free(1, 2)
    assert not loader.pays_ahead(opened(1 << 30)), "nothing is known"
    for _ in range(3):
        costs.loaded("disk", 1 << 20, 0.0005)  # 2 GB/s
    assert loader.pays_ahead(opened(32 << 20))
    assert not loader.pays_ahead(opened(1 << 20)), "over before a thread has begun"
    free(2, 2)
    assert not loader.pays_ahead(opened(32 << 20)), "it would take the model's processor"
    for _ in range(7):
        costs.loaded("disk", 1 << 20, 0.01)  # 0.1 GB/s: mostly waiting
    assert loader.pays_ahead(opened(32 << 20))


class Streamer:
    """What `generate()` hands on: the prompt, then tokens."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def put(self, ids: torch.Tensor) -> None:
        self.given.append(ids.flatten().tolist())

    def end(self) -> None:
        pass


@pytest.mark.usefixtures("always")
def test_a_streamer_is_given_the_prompt_once(tmp_path: Path, started: list[PlacingAhead]) -> None:
    store = DiskStore(tmp_path, durable=False)
    engine = make_engine("llama", store)
    keys = engine.add(TEXTS)
    flipped(store.path(keys[-1]), 1 + 4 * 128)
    streamer = Streamer()
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=3, streamer=streamer)
    assert (store.stats().corrupt, started) == (1, [])
    prompt, *tokens = streamer.given
    assert len(prompt) > 1
    assert tokens == [[token] for token in answer.token_ids]


@pytest.mark.usefixtures("always")
def test_an_interrupted_loader_writes_into_no_other_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[PlacingAhead]
) -> None:
    engine = make_engine("llama", DiskStore(tmp_path, durable=False))
    engine.add(TEXTS)
    expected = plainly(engine)
    layers, gate = engine.model.model.layers, threading.Event()

    def late(self: Placing, group: int, number: int) -> None:
        assert gate.wait(10)
        for part in self.parts:
            part.place.values(group)[number].fill_(torch.nan)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = layers[0].register_forward_pre_hook(interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(Placing, "place", late)
        patch.setattr(PlacingAhead, "close", interrupt)  # again, while it waits for the thread
        with pytest.raises(KeyboardInterrupt):
            engine.logits(QUESTION, TEXTS, policy=Reuse())
    hook.remove()

    def let_it_write(*_: Any) -> None:
        gate.set()
        started[0]._thread.join()

    layers[0].register_forward_pre_hook(let_it_write)
    monkeypatch.setattr(ContextLoader, "pays_ahead", lambda *_: False)
    assert torch.equal(engine.logits(QUESTION, TEXTS, policy=Reuse()), expected)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", ["llama dynamic", "llama longrope"])
def test_the_loader_calls_nothing_of_the_model(
    tmp_path: Path, started: list[PlacingAhead], name: str
) -> None:
    engine = make_engine(name, DiskStore(tmp_path, durable=False))
    engine.add(TEXTS)
    callers: set[str] = set()
    # Frequencies that depend on the length are told by a call that changes the module.
    engine.model.model.rotary_emb.register_forward_pre_hook(
        lambda *_: callers.add(threading.current_thread().name)
    )
    engine.logits(QUESTION, TEXTS, policy=Reuse())
    assert started
    assert callers == {threading.current_thread().name}
