"""Prefilling: batches, locks, progress and precision."""

from __future__ import annotations

import ctypes
import re
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor, TimeoutError
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import QUESTION, TEMPLATE
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, MemoryStore
from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, chunk_key, spec_digest
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.prefill import BATCH_TOKENS, ContextChunk, Prefiller, batches
from kvcache_rag.stores.device import device_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SPEC = spec_digest({"test": "prefill"})
TEXTS = ["The cat sat on the mat.", "A dog ran away.", "It rained for three days."]
LONG = ["x" * 1200 + str(number) for number in range(3)]  # each a batch of its own


class Passes:
    """Rows and columns of every forward pass."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch, fails_at: int = 0) -> None:
        self.shapes: list[tuple[int, int]] = []
        # A forward pass that is put into one model names its chunks otherwise.
        kind = type(engine.model)
        forward = kind.forward

        def counted(model: Any, *args: Any, **kwargs: Any) -> Any:
            if len(self.shapes) + 1 == fails_at:
                raise RuntimeError("out of memory")
            ids = args[0] if args else kwargs["input_ids"]
            self.shapes.append(tuple(ids.shape))
            return forward(model, *args, **kwargs)

        patch.setattr(kind, "forward", counted)


def pending(ids: tuple[int, ...]) -> ContextChunk:
    return ContextChunk(chunk_key(ids, prefix_ids=(), spec=SPEC, namespace=""), ids)


def make_engine(**options: Any) -> Engine:
    return Engine(build("qwen2"), byte_tokenizer(), template=TEMPLATE, **options)


@given(st.lists(st.integers(1, 3000), max_size=40))
def test_batches_hold_every_chunk_once_sorted_and_bounded(lengths: list[int]) -> None:
    given_chunks = [pending((index % 7,) * length) for index, length in enumerate(lengths)]
    found = list(batches(given_chunks))
    flat = [one for batch in found for one in batch]
    assert sorted(map(id, flat)) == sorted(map(id, given_chunks))
    sizes = [len(one.ids) for one in flat]
    assert sizes == sorted(sizes)
    for batch in found:
        padded = len(batch) * max(len(one.ids) for one in batch)
        assert padded <= BATCH_TOKENS or len(batch) == 1
    for batch, later in pairwise(found):
        assert (len(batch) + 1) * len(later[0].ids) > BATCH_TOKENS, "a batch was closed too early"


class LockedStore(MemoryStore):
    """Notes which keys are written while which locks are held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[ChunkKey] = set()
        self.written: list[tuple[ChunkKey, bool]] = []

    @contextmanager
    def locked(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        with super().locked(keys := list(keys)):
            self.held.update(keys)
            try:
                yield
            finally:
                self.held.difference_update(keys)

    def put(self, key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
        self.written.append((key, key in self.held))
        return super().put(key, chunk, generation)


def test_chunks_are_computed_and_written_under_their_locks() -> None:
    store = LockedStore()
    engine = make_engine(store=store)
    keys = engine.add(["one text", "another text", "one text"])
    engine.generate("Who?", ["one text", "a third"], max_new_tokens=1)
    chunks = {*keys, *engine.keys(["a third"])}
    prefix = [key for key, _ in store.written if key.start == 0]
    assert {key for key, locked in store.written if locked} == {*chunks, *prefix}
    assert store.held == set()
    assert len(prefix) == 1
    assert len(store.written) == len(chunks) + 1, "each once, and the prefix"


def test_what_another_thread_stored_meanwhile_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = LockedStore()
    prefiller = Prefiller(TransformersModel(build("qwen2")), store, (5, 6), SPEC, "")
    ids = [tuple(range(10, 30)), tuple(range(40, 60))]
    work = [ContextChunk(prefiller.key(one), one) for one in ids]
    computed: list[int] = []
    original = prefiller.compute

    def compute(batch: Any) -> list[ChunkKV]:
        computed.append(len(batch))
        return original(batch)

    monkeypatch.setattr(prefiller, "compute", compute)
    with ThreadPoolExecutor(1) as pool:
        with store.locked([work[0].key]):
            waiting = pool.submit(prefiller.fill_batch, work)
            with pytest.raises(TimeoutError):
                waiting.result(0.2)  # it must wait for the lock
            assert computed == []
            MemoryStore.put(store, work[0].key, original([ids[0]])[0])
        assert set(waiting.result(20)) == {work[1].key}
    assert computed == [1]
    assert prefiller.fill_batch(work) == prefiller.fill_batch([]) == {}
    assert prefiller.fill(work) == 0


def test_a_batch_is_the_same_as_each_alone() -> None:
    prefiller = Prefiller(TransformersModel(build("gemma3")), MemoryStore(), (5, 6, 7), SPEC, "")
    ids = [tuple(range(10, 10 + length)) for length in (3, 40, 61)]
    for one, chunk in zip(ids, prefiller.compute(ids), strict=True):
        (alone,) = prefiller.compute([one])
        assert chunk.tokens.tolist() == list(one)
        assert chunk.start == 3
        for tensor, other in zip(parts(chunk), parts(alone), strict=True):
            assert float((tensor - other).abs().max()) < 1e-4


def parts(chunk: ChunkKV) -> list[torch.Tensor]:
    return [tensor for group in chunk.tensors for tensor in group]


def test_a_stored_chunk_does_not_hold_the_memory_of_its_batch() -> None:
    engine = make_engine()
    layout = access.chunk_layout(engine)
    for key in engine.add(TEXTS):
        for tensor in parts(engine.store.get(key, layout).chunk):
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_progress_is_shown_only_when_asked_and_only_for_work(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache_rag.progress._PAUSE", 0.0)  # lines of what is soon over, too
    engine = make_engine()
    engine.generate("Who?", ["quiet text"], max_new_tokens=1)
    assert capfd.readouterr() == ("", "")
    engine.add(["first text", "second text", "first text"], show_progress=True)
    shown = capfd.readouterr()
    last = shown.err.splitlines()[-1]
    assert re.fullmatch(r"prefill: (\d+)/\1 tokens, 2/2 chunks", last), last
    assert shown.out == ""
    engine.add(["first text"], show_progress=True)
    assert capfd.readouterr() == ("", ""), "nothing to do, nothing to show"


def test_an_empty_prefix_is_not_stored() -> None:
    store = LockedStore()
    prefiller = Prefiller(TransformersModel(build("qwen2")), store, (), SPEC, "")
    assert prefiller.prefix() is None
    ids = tuple(range(9, 20))
    assert prefiller.fill([ContextChunk(prefiller.key(ids), ids)]) == 1
    assert [key.start for key, _ in store.written] == [0]


def test_a_cached_question_runs_the_model_over_the_question_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    query = len(engine.tokenize(QUESTION).query)
    engine.add([*TEXTS, TEXTS[0]])
    passes = Passes(engine, monkeypatch)
    engine.add(TEXTS)
    assert passes.shapes == []
    engine.generate(QUESTION, [*TEXTS, TEXTS[0]], max_new_tokens=3)
    assert passes.shapes == [(1, query), (1, 1), (1, 1)]


def test_adding_resumes_where_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    with monkeypatch.context() as patch:
        Passes(engine, patch, fails_at=4)  # prefix for the store, prefix, two chunks
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.add(LONG)
    keys = engine.keys(LONG)
    held = [engine.store.contains(key) for key in keys]
    assert 0 < sum(held) < 3
    passes = Passes(engine, monkeypatch)
    assert engine.add(LONG) == keys
    assert len(passes.shapes) == 3 - sum(held)
    assert all(engine.store.contains(key) for key in keys)


class FailingStore(MemoryStore):
    """Fails to write anything but the prefix while there is an error."""

    error: BaseException | None = RuntimeError("a fault of the store")

    def put(self, key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
        if key.start and self.error is not None:
            raise self.error
        return super().put(key, chunk, generation)


def test_a_batch_is_computed_while_the_one_before_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    engine = make_engine(store=store)
    engine.add(["the instruction is computed"])
    prefiller: Any = access.prefiller(engine)
    reached, gate = threading.Event(), threading.Event()
    put, compute, computed = store.put, prefiller.compute, []

    def gated(*values: Any, **options: Any) -> bool:
        reached.set()
        assert gate.wait(20)
        return put(*values, **options)

    def noted(ids: Any) -> list[ChunkKV]:
        computed.append(len(ids))
        if len(computed) == 2:
            assert reached.wait(20)
            gate.set()  # else the first batch would never be written
        result: list[ChunkKV] = compute(ids)
        return result

    monkeypatch.setattr(store, "put", gated)
    monkeypatch.setattr(prefiller, "compute", noted)
    assert all(map(store.contains, engine.add(LONG)))
    assert computed == [1, 1, 1]


@pytest.mark.parametrize("count", [1, 3])
def test_what_goes_wrong_while_a_batch_is_written_is_raised(count: int) -> None:
    store = FailingStore()
    engine = make_engine(store=store)
    with pytest.raises(RuntimeError, match="a fault of the store"):
        engine.add(LONG[:count])
    store.error = None
    assert all(map(store.contains, engine.add(LONG))), "nothing is locked any more"


@pytest.mark.parametrize("started", [0, 1])
def test_without_threads_batches_are_written_all_the_same(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    begun: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        if len(begun) == started:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    store = LockedStore()
    engine = make_engine(store=store)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        keys = engine.add(LONG)
    assert all(map(store.contains, keys))
    assert all(locked for key, locked in store.written if key.start)


def test_a_stopped_ingestion_ends_with_its_batch_and_goes_on_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    engine = make_engine(store=store)
    engine.add(["the instruction is computed"])
    before, stop = store.stats().puts, threading.Event()
    compute = access.prefiller(engine).compute
    monkeypatch.setattr(access.prefiller(engine), "compute", lambda ids: stop.set() or compute(ids))
    with pytest.raises(CancelledError, match="prefilling was cancelled"):
        engine.add(LONG, cancelled=stop)
    assert [store.contains(key) for key in engine.keys(LONG)] == [True, False, False]
    engine.add(LONG, cancelled=threading.Event())
    assert store.stats().puts == before + len(LONG)


def test_a_new_thread_computes_with_as_many_threads_as_were_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libraries = Path("/proc/self/maps")
    found = re.search(
        r"\S*/torch/lib/\S*gomp\S*", libraries.read_text() if libraries.is_file() else ""
    )
    if found is None:
        pytest.skip("torch has no OpenMP of GNU here")
    openmp, before, seen = ctypes.CDLL(found[0]), torch.get_num_threads(), []
    engine = make_engine()
    compute = access.prefiller(engine).compute

    def counting(ids: Any) -> Any:
        seen.append(openmp.omp_get_max_threads())
        return compute(ids)

    monkeypatch.setattr(access.prefiller(engine), "compute", counting)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            adding = threading.Thread(target=engine.add, args=([f"text {count}"],))
            adding.start()
            adding.join(20)
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 3]


def test_prefilling_ends_at_the_last_keys_and_values() -> None:
    engine = make_engine()
    engine.add(["the instruction is computed"])
    ran: list[str] = []
    last = engine.model.model.layers[-1]
    for name, module in (("last", last.mlp), ("head", engine.model.lm_head)):
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    engine.add(TEXTS)
    assert ran == [], "nobody reads what they make"
    engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    assert ran == ["last", "head"]


def test_the_prefix_is_kept_where_the_model_is() -> None:
    engine = make_engine()
    prefiller: Any = access.prefiller(engine)
    prefiller.prefix()
    prefiller.forget_prefix()
    access.adapter(engine).device = torch.device("meta")  # the store holds it in main memory
    assert device_of(prefiller.prefix()) == torch.device("meta")
