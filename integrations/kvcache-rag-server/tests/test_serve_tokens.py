"""A stored document is tokenised once per request, whatever looks at it on its way."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import access
import pytest
from serve_works import (
    QUESTION,
    TEXTS,
    answer_of,
    events_of,
    eventually,
    held,
    loaded,
    make_work,
)

from kvcache_rag import Answer, Engine, MemoryStore
from kvcache_rag.policies import policy_by_name
from kvcache_rag_server.backend import Failed, Finished
from kvcache_rag_server.local import LocalBackend

OTHERS = ("The harbour of Vell is deep.", "Maps are sold on Mondays.", "The lighthouse is white.")


class CountingTokenizer:
    """Counts how often each of some texts is tokenised; of other texts it only hands on."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.calls: Counter[str] = Counter()

    def __call__(self, text: str, *arguments: Any, **options: Any) -> Any:
        self.calls.update(one for one in (*TEXTS, *OTHERS) if one in text)
        return self._tokenizer(text, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture
def tokenizer() -> CountingTokenizer:
    return CountingTokenizer(loaded()[1])


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of earlier requests: what is counted here is one request's."""
    monkeypatch.setattr("kvcache_rag.prompt.renderer._REMEMBERED", 0)


@pytest.fixture
def engine(tokenizer: CountingTokenizer) -> Engine:
    """An engine that has stored some texts."""
    model, _, template = loaded()
    found = Engine(model, tokenizer, template=template, store=MemoryStore())
    found.add(TEXTS)
    tokenizer.calls.clear()
    return found


async def waited(backend: LocalBackend, patch: pytest.MonkeyPatch, work: Any) -> Answer:
    """The answer to a request that waits behind another one until its chunks were prefetched."""

    def is_prefetched() -> bool:
        jobs = access.scheduler(backend)._queue.jobs()
        return any(job.prefetch is not None and job.prefetch.done.done() for job in jobs)

    try:
        valve, front = await held(backend, patch)
        task = asyncio.create_task(events_of(backend, work))
        await eventually(is_prefetched)
        valve.open.set()
        await front
        last = (await task)[-1]
    finally:
        await backend.close()
    assert isinstance(last, Finished)
    assert last.answer.metrics.hits == {"memory": 3}
    return last.answer


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("policy", [None, "cacheblend:0.3", "full"])
async def test_without_prefetch(
    engine: Engine, tokenizer: CountingTokenizer, policy: str | None, is_counted: bool
) -> None:
    backend = LocalBackend(engine)
    work = make_work(1, policy=policy)
    try:
        tokens = await backend.count(work) if is_counted else None
        answer = await answer_of(backend, work)
    finally:
        await backend.close()
    assert tokens in (None, answer.metrics.prompt_tokens)
    is_full = policy == "full"  # it computes what is stored, so it reads it
    assert tokenizer.calls == dict.fromkeys(TEXTS, 1 + (is_counted and is_full))


async def test_what_is_not_answered_from_is_neither_counted_nor_tokenised(
    engine: Engine, tokenizer: CountingTokenizer
) -> None:
    """Nor does it make a prompt too long, whatever is asked of it."""
    long = OTHERS[0] * engine.context_window
    chunks = (TEXTS[0], long, *OTHERS[1:])
    backend = LocalBackend(engine)
    try:
        for system in ((), ("Answer about lighthouses, in a word.",)):
            work = make_work(1, policy="bestfew:1", chunks=chunks, system=system)
            tokens = await backend.count(work)
            explained = await backend.explain(work)
            answer = await answer_of(backend, work)
            assert answer.metrics.prompt_tokens == tokens == len(explained["tokens"])
            assert answer.metrics.answered_from == explained["answered_from"] == (0,)
            assert answer.metrics.unused_chunks == explained["unused_chunks"] == 3
        refused = await events_of(backend, replace(work, policy=policy_by_name("full")))
    finally:
        await backend.close()
    assert isinstance(refused[0], Failed)
    assert refused[0].status == 400


@pytest.mark.parametrize("is_counted", [False, True])
async def test_with_prefetch(
    engine: Engine, tokenizer: CountingTokenizer, monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> None:
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=8)
    tokenizer.calls.clear()
    backend = LocalBackend(engine, prefetch=engine, prefetch_after=0.0)
    work = make_work(1)
    if is_counted:
        await backend.count(work)
    answer = await waited(backend, monkeypatch, work)
    assert answer.text == expected.text
    assert tokenizer.calls == dict.fromkeys(TEXTS, 1)


@pytest.mark.parametrize("texts", [TEXTS, OTHERS])
async def test_what_is_handed_on_changes_no_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, texts: tuple[str, ...]
) -> None:
    """Keys of chunks that are stored, were lost meanwhile, or were never stored."""
    alone = engine.generate(QUESTION, texts, max_new_tokens=8)
    backend = LocalBackend(engine)
    try:
        for _ in range(2):
            work = make_work(1, chunks=texts)
            await backend.count(work)
            for key in engine.keys(TEXTS):
                engine.store.delete(key)
            answer = await answer_of(backend, work)
            assert (answer.text, answer.token_ids) == (alone.text, alone.token_ids)
    finally:
        await backend.close()
