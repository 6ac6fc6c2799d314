"""What several askers miss at once, chunks and the prefix before them, is computed once."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from forks import forkserver
from laws import TEMPLATE
from zoo import build, byte_tokenizer

from kvcache_rag import DiskStore, Engine, MemoryStore, TieredStore
from kvcache_rag.codecs import Int8
from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.models.hf import TransformersModel
from tests.chunks import flat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV
    from kvcache_rag.stores import ChunkStore

TEXTS = ["The cat sat on the mat.", "A dog ran away."]
PATIENCE = 20.0  # seconds


class Meeting:
    """Two askers both miss a key before either goes on: the worst order there is."""

    def __init__(self, store: ChunkStore, meet: Callable[[ChunkKey], None]) -> None:
        self._get, self._meet = store.get, meet
        self._met: set[tuple[int, ChunkKey]] = set()
        store.get = self.get  # type: ignore[method-assign]  # waits for the others

    def get(self, key: ChunkKey, *given: Any, **named: Any) -> Any:
        try:
            return self._get(key, *given, **named)
        except ChunkNotFoundError:
            asker = threading.get_ident(), key
            if asker not in self._met:
                self._met.add(asker)
                self._meet(key)
            raise


class Counts:
    """Puts of a store, and what engines compute."""

    def __init__(self, store: ChunkStore) -> None:
        self.puts: Counter[int] = Counter()  # by the position of the first token
        self.computed: Counter[tuple[int, ...]] = Counter()  # by ids
        put = store.put

        def counted(key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
            self.puts[key.start] += 1
            return put(key, chunk, generation)

        store.put = counted  # type: ignore[method-assign]  # a spy

    def watch(self, engine: Engine) -> Engine:
        prefill = TransformersModel.prefill
        adapter = access.adapter(engine)

        def counted(prefix: ChunkKV | None, chunks: Sequence[Sequence[int]]) -> list[ChunkKV]:
            self.computed.update(map(tuple, chunks))
            return prefill(adapter, prefix, chunks)

        adapter.prefill = counted  # type: ignore[method-assign]  # a spy
        return engine


def engine_of(store: ChunkStore) -> Engine:
    """An engine with weights of its own, equal to every other's, and so with a lock of its own."""
    return Engine(build("qwen2"), byte_tokenizer(), store=store, template=TEMPLATE)


def answer(engine: Engine) -> None:
    engine.generate("Who?", TEXTS, max_new_tokens=1)


def add(engine: Engine) -> None:
    engine.add(TEXTS)


def ids_of(engine: Engine) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Of the prefix, and of each text."""
    prompt = engine.tokenize("Who?", TEXTS)
    return tuple(prompt.prefix), [tuple(ids) for ids in prompt.chunks]


def disk(folder: Path) -> ChunkStore:
    return DiskStore(folder / "kv", durable=False)


STORES: dict[str, Callable[[Path], ChunkStore]] = {
    "memory": lambda _: MemoryStore(),
    "disk": disk,
    "tiered": lambda folder: TieredStore(MemoryStore(), disk(folder)),
    "int8": lambda folder: DiskStore(folder / "kv", codec=Int8(), durable=False),
}


@pytest.mark.parametrize(
    ("name", "second", "first"),
    [
        *(("memory", second, first) for second in (answer, add) for first in (answer, add)),
        *((name, answer, answer) for name in STORES if name != "memory"),
    ],
)
def test_two_threads_that_miss_at_once_compute_the_prefix_and_each_chunk_once(
    name: str, first: Callable[[Engine], None], second: Callable[[Engine], None], tmp_path: Path
) -> None:
    store = STORES[name](tmp_path)
    counts = Counts(store)
    barriers: defaultdict[ChunkKey, threading.Barrier] = defaultdict(lambda: threading.Barrier(2))
    engines = [counts.watch(engine_of(store)) for _ in range(2)]

    def meet(key: ChunkKey) -> None:
        with suppress(threading.BrokenBarrierError):  # who adds chunks looks without reading
            barriers[key].wait(0.2 if key.start else PATIENCE)

    Meeting(store, meet)
    threads = [
        threading.Thread(target=ask, args=(engine,))
        for ask, engine in zip((first, second), engines, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    prefix, chunks = ids_of(engines[0])
    assert counts.puts == {0: 1, len(prefix): len(chunks)}
    # Chunks attend to the prefix as it was computed: who cannot read that computes it, too.
    expected = Counter([prefix] * (2 if name == "int8" else 1) + chunks)
    assert counts.computed - expected == Counter()
    assert {**counts.computed, prefix: 1} == {**dict.fromkeys(chunks, 1), prefix: 1}


def one_of_two(folder: str, number: int, report: Any) -> None:
    """Answer from a store that another process fills meanwhile."""
    place = Path(folder)
    store = disk(place)
    counts = Counts(store)
    engine = counts.watch(engine_of(store))

    def meet(key: ChunkKey) -> None:
        mine, theirs = (place / f"{key.digest}-{one}" for one in (number, 1 - number))
        mine.touch()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not theirs.exists():
            time.sleep(0.001)

    Meeting(store, meet)
    answer(engine)
    report.put((number, dict(counts.puts), dict(counts.computed)))


def test_two_processes_that_miss_at_once_compute_the_prefix_and_each_chunk_once(
    tmp_path: Path,
) -> None:
    context = forkserver()
    report = context.Queue()
    workers = [
        context.Process(target=one_of_two, args=(str(tmp_path), number, report))
        for number in range(2)
    ]
    for worker in workers:
        worker.start()
    puts: Counter[int] = Counter()
    computed: Counter[tuple[int, ...]] = Counter()
    for _ in workers:
        _, written, made = report.get(timeout=120)
        puts.update(written)
        computed.update(made)
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    prefix, chunks = ids_of(engine_of(disk(tmp_path)))
    assert puts == {0: 1, len(prefix): len(chunks)}
    assert computed == Counter([prefix, *chunks])


def assert_same_chunk(key: ChunkKey, layout: Any, *stores: ChunkStore) -> None:
    mine, theirs = (store.get(key, layout).chunk for store in stores)
    assert all(map(torch.equal, flat(mine), flat(theirs)))


def test_a_prefix_that_is_read_gives_the_chunks_that_a_computed_one_gives(tmp_path: Path) -> None:
    first, later = disk(tmp_path), disk(tmp_path)
    alone = engine_of(MemoryStore())
    for one in (engine_of(first), alone):  # in batches of one size, which may decide how it rounds
        one.add(TEXTS[:1])
    engine = engine_of(later)
    counts = Counts(later)
    keys = counts.watch(engine).add(TEXTS)
    _, chunks = ids_of(engine)
    assert counts.computed == Counter(chunks[1:])
    assert alone.add(TEXTS) == keys
    for key in keys:
        assert_same_chunk(key, access.chunk_layout(engine), engine.store, alone.store)


def test_chunks_attend_to_the_prefix_as_it_was_computed_and_not_as_it_was_rounded() -> None:
    shared, other = MemoryStore(codec="int8"), MemoryStore(codec="int8")
    engine_of(shared).generate("Who?", TEXTS[:1], max_new_tokens=1)
    later, alone = engine_of(shared), engine_of(other)
    later.generate("Who?", TEXTS[:1], max_new_tokens=1)  # reads the prefix
    (key,) = later.add(TEXTS[1:2])
    assert alone.add(TEXTS[1:2]) == [key]
    assert_same_chunk(key, access.chunk_layout(later), shared, other)
