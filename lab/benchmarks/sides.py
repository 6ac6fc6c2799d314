"""The sides of the benchmark: what answers the same prompts, and from where.

Stock sides and TurboRAG's way are in `stock` and `turborag`; this module has ours and the floor.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.shapes import CHUNK, PREFIX, build_tokenizer, words
from benchmarks.stock import Sample, Stock, TurboRag, timed_generate
from kvcache_rag import DiskStore, Engine, MemoryStore, PromptTemplate, Reuse
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.models.cache import CACHE_NAME, buffer_cache
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.stitching.stitch import materialise, placed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from kvcache_rag.kv.chunk import ChunkKey, ChunkLayout

TEMPLATE_WORDS: Final = 2  # the plain template adds "Question:" and "Answer:"
MEMORY: Final = 64 << 30
FLOOR_TOKENS: Final = 64  # room of the floor's buffer for generated tokens
# Sides in the order in which they take turns.
NAIVE, PREFIXED, TURBORAG = "naive", "prefix-cached", "turborag"
COLD, PAGES, RAM = "disk", "page cache", "ram"
RESIDENT, DEFERRED, FLOOR = "resident", "deferred", "floor"
STOCK: Final = "stock"  # decoding over a stock cache of the whole context
ALL: Final = (NAIVE, PREFIXED, STOCK, TURBORAG, COLD, PAGES, RAM, RESIDENT, DEFERRED, FLOOR)


@dataclass(frozen=True)
class Case:
    """What is asked.

    Attributes:
        context: Tokens of the chunks of each row.
        query: Tokens of the query.
        batch: Rows, each with chunks and a query of its own.
    """

    context: int
    query: int
    batch: int = 1

    @property
    def texts(self) -> list[list[str]]:
        """Chunks of each row."""
        count = self.context // CHUNK
        return [
            [words(CHUNK, 100 + row * count + index) for index in range(count)]
            for row in range(self.batch)
        ]

    @property
    def questions(self) -> list[str]:
        """The question of each row."""
        return [words(self.query - TEMPLATE_WORDS, 7 + row) for row in range(self.batch)]


class Bench:
    """One model, its chunks in every kind of store, and all sides over them."""

    def __init__(self, model: Any, folder: Path) -> None:
        """Measure with `model`; files go to `folder`."""
        model.generation_config.eos_token_id = None  # every side generates as many as asked for
        self.model = model
        self.template = PromptTemplate(system=words(PREFIX, 1) + " ", chunk_start="", chunk_end="")
        self.disk = DiskStore(folder / "chunks", durable=False)
        is_cuda = model.device.type == "cuda"
        # Host memory; and the memory that the model computes in, which on a CPU is the same.
        self.memory = MemoryStore(MEMORY, pinned=is_cuda)
        self.beside = MemoryStore(MEMORY, device=model.device) if is_cuda else self.memory
        self._folder = folder
        self._engines: dict[str, Engine] = {}
        self._stock: tuple[Case, Stock] | None = None
        self._prompts = self.engine(PAGES)
        self.prefix_ids = self._prompts.tokenize("w1").prefix

    @cached_property
    def adapter(self) -> TransformersModel:
        """The model as measured by the library, for the floor."""
        return TransformersModel(self.model)

    @cached_property
    def turborag(self) -> TurboRag:
        """TurboRAG's way."""
        return TurboRag(self.model, self._folder / "turborag", self.prefix_ids)

    @property
    def layout(self) -> ChunkLayout:
        """Shapes of a chunk's tensors."""
        return self.adapter.measured.chunk_layout

    def engine(self, name: str) -> Engine:
        """The engine of one of our sides, made when it is first asked for."""
        if name not in self._engines:
            self._engines[name] = Engine(
                self.model,
                build_tokenizer(),
                store=self._store(name),
                template=self.template,
                rotation="deferred" if name == DEFERRED else "copied",
                prompt_memory=0,  # every prompt is timed as if it were the first
            )
        return self._engines[name]

    def _store(self, name: str) -> DiskStore | MemoryStore:
        if name in (PAGES, COLD):
            return self.disk
        return self.memory if name == RAM else self.beside

    def ids(self, case: Case) -> Tensor:
        """`(batch, tokens)` int64: the prompts, all of one length."""
        asked = zip(case.questions, case.texts, strict=True)
        return torch.tensor([self._prompts.tokenize(*one).all for one in asked])

    def chunk_ids(self, case: Case) -> list[tuple[tuple[int, ...], ...]]:
        """Ids of the chunks of each row."""
        return [self._prompts.tokenize("w1", texts).chunks for texts in case.texts]

    def sides(self, case: Case, absent: Collection[str] = ()) -> dict[str, Callable[[int], Sample]]:
        """The sides of a case but those `absent`; each call answers with so many tokens."""
        none = {RESIDENT} if self.beside is self.memory else set()
        return {name: self.side(name, case) for name in ALL if name not in {*none, *absent}}

    def side(self, name: str, case: Case) -> Callable[[int], Sample]:
        """One side of a case, with its chunks where it looks for them."""
        if name in (NAIVE, PREFIXED, STOCK):
            stock = self._stock_of(case)
            named = {NAIVE: stock.naive, PREFIXED: stock.prefix_cached, STOCK: stock.over_context}
            return named[name]
        if name == TURBORAG:
            return self._turborag(case)
        rows = [self._prompts.add(texts) for texts in case.texts]
        store = self._store(name)
        for key in (key for keys in rows for key in keys):
            if store.locate(key) is None:
                store.put(key, self.disk.get(key, self.layout).chunk)
        if name == FLOOR:
            return self._floor(case, rows)
        return self._ours(name, case, rows)

    def _stock_of(self, case: Case) -> Stock:
        if self._stock is None or self._stock[0] != case:
            prefix = len(self.prefix_ids)
            self._stock = case, Stock(self.model, self.ids(case), prefix, prefix + case.context)
        return self._stock[1]

    def forget(self) -> None:
        """Let go of what the stock sides of the last case hold."""
        self._stock = None

    def _turborag(self, case: Case) -> Callable[[int], Sample]:
        ids, chunks, turborag = self.ids(case), self.chunk_ids(case), self.turborag
        for chunk in (chunk for row in chunks for chunk in row):
            turborag.add(chunk)
        return lambda new_tokens: turborag.generate(ids, chunks, new_tokens)

    def _ours(
        self, name: str, case: Case, rows: Sequence[Sequence[ChunkKey]]
    ) -> Callable[[int], Sample]:
        engine = self.engine(PAGES if name == COLD else name)
        asked = list(zip(case.questions, rows, strict=True))

        def run(new_tokens: int) -> Sample:
            if name == COLD:
                self._drop_pages(rows)
            options: Mapping[str, Any] = {"max_new_tokens": new_tokens, "policy": Reuse()}
            if case.batch == 1:
                answers = [engine.generate(*asked[0], **options)]
            else:
                answers = engine.generate_batch(asked, **options)
            found = [answer.metrics for answer in answers]
            first = found[0]
            if any(one.reused_tokens != case.context for one in found):
                raise RuntimeError(f"{name}: only {first.reused_tokens} tokens were reused")
            if name == DEFERRED and first.rotation != "deferred":
                raise RuntimeError(f"{name}: keys were copied: {first.not_deferred}")
            parts = {
                "load": sum(one.load for one in found),
                "stitch": sum(one.stitch for one in found),
                "prefill": first.prefill,
            }
            steps = new_tokens - 1
            step = (first.total - first.ttft) / steps if steps else 0.0
            return Sample(first.ttft, step, answers[0].token_ids[0], parts)

        return run

    def _floor(self, case: Case, rows: Sequence[Sequence[ChunkKey]]) -> Callable[[int], Sample]:
        """`generate()` alone over a stitched cache that lies in place before the clock starts."""
        prefix, ids = len(self.prefix_ids), self.ids(case)
        held = prefix + case.context
        room = held + case.query + FLOOR_TOKENS
        buffer = KVBuffer.allocate(self.layout, case.batch, room, self.adapter.device)
        self._place_prefix(buffer, ids)
        for row, keys in enumerate(rows):
            ids_of_prefix = torch.tensor(self.prefix_ids, dtype=torch.int32)
            place = buffer.single(row, 0)
            parts = [place.view(0, 0, prefix, local_start=0, tokens=ids_of_prefix)]
            parts += [self.beside.get(key, self.layout).chunk for key in keys]
            materialise(self.adapter.measured, placed(parts, "reordered"), place)

        def run(new_tokens: int) -> Sample:
            cache = buffer_cache(buffer, self.adapter.measured.kinds, held)
            return timed_generate(self.model, ids, new_tokens, cache)

        return run

    def _place_prefix(self, buffer: KVBuffer, ids: Tensor) -> None:
        tokens = len(self.prefix_ids)
        cache = buffer_cache(buffer, self.adapter.measured.kinds, 0)
        with torch.inference_mode():
            self.model.model(
                ids[:, :tokens].to(self.model.device), **{CACHE_NAME: cache}, use_cache=True
            )

    def _drop_pages(self, rows: Sequence[Sequence[ChunkKey]]) -> None:
        """Drop the files of chunks from the page cache, where the file system can."""
        for keys in rows:
            for key in keys:
                descriptor = os.open(self.disk.path(key), os.O_RDONLY)
                try:
                    os.fsync(descriptor)  # what is not written yet cannot be dropped
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)

    def agreement(self, case: Case) -> dict[str, float]:
        """Root mean square difference of the query's logits from ours, in standard deviations."""
        for name in (TURBORAG, RAM):
            self.side(name, case)  # its chunks are there then
        question, texts = case.questions[0], case.texts[0]
        ours = self.engine(RAM).logits(question, texts, policy=Reuse())
        deferred = self.engine(DEFERRED).logits(question, texts, policy=Reuse())
        chunks = self.chunk_ids(case)[0]
        theirs = self.turborag.logits(self.ids(case)[:1], chunks, case.query)
        return {TURBORAG: _apart(theirs, ours), DEFERRED: _apart(deferred, ours)}


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).pow(2).mean().sqrt() / other.std())


def release() -> None:
    """Collect what a case left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
