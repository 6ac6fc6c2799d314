"""The server over the packaged reader: the same answers as the engine's, and what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from serve_fakes import chat, client, data_of, settings, tiny_backend

from kvcache_rag import Engine
from kvcache_rag_server.app import build_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fastapi import FastAPI

    from kvcache_rag_server.local import LocalBackend

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = "Where does Bralo keep the red lamp?"
DOCUMENTS = [
    "Bralo keeps the red lamp in the hall. The blue cup belongs to Mira.",
    "Sorin keeps the old map in the cellar. The key belongs to Tano.",
    "Mira keeps the blue cup in the kitchen. The lamp belongs to Bralo.",
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """What the server's answers are held against; it shares nothing with it."""
    return Engine.from_pretrained("tiny", device="cpu")


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    with tiny_backend(tmp_path / "kv") as found:
        yield found


@pytest.fixture
def app(backend: LocalBackend) -> FastAPI:
    return build_app(backend, settings())


async def post(app: FastAPI, body: dict[str, Any], path: str = CHAT, **headers: str) -> Any:
    async with client(app) as http:
        reply = await http.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return data_of(reply.text) if body.get("stream") else reply.json()


async def test_documents_are_computed_once_and_then_reused(app: FastAPI, engine: Engine) -> None:
    ids = engine.tokenize(QUESTION, DOCUMENTS)
    chunks, prefix = sum(map(len, ids.chunks)), len(ids.prefix)
    assert prefix > 0
    cold = await post(app, chat(QUESTION, documents=DOCUMENTS))
    warm = await post(app, chat(QUESTION, documents=DOCUMENTS))
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = prefix + chunks + warm["kvcache"]["continued_tokens"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert (cold["kvcache"]["misses"], warm["kvcache"]["hits"]) == (3, {"memory": 3})
    for body in (cold, warm):
        usage = body["usage"]
        assert usage["prompt_tokens"] == len(ids.all)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (cold["kvcache"]["prefilled_tokens"], cold["kvcache"]["reused_tokens"]) == (chunks, 0)
    assert (warm["kvcache"]["prefilled_tokens"], warm["kvcache"]["reused_tokens"]) == (0, chunks)
    expected = engine.generate(QUESTION, DOCUMENTS)
    for body in (cold, warm):
        assert body["choices"][0]["message"]["content"] == expected.text
        assert body["usage"]["completion_tokens"] == expected.metrics.generated_tokens


async def test_part_of_the_documents_is_known(app: FastAPI, engine: Engine) -> None:
    await post(app, chat(QUESTION, documents=DOCUMENTS[:1]))
    body = await post(app, chat(QUESTION, documents=DOCUMENTS[::-1]))
    ids = engine.tokenize(QUESTION, DOCUMENTS)
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(ids.prefix) + len(ids.chunks[0])


async def test_the_form_of_a_document_does_not_matter_to_the_store(app: FastAPI) -> None:
    text = DOCUMENTS[0]
    await post(app, chat(QUESTION, documents=[text]))
    for form in ({"text": text}, {"id": "1", "title": "t", "text": text}, {"data": text}):
        body = await post(app, chat(QUESTION, documents=[form]))
        assert body["kvcache"]["hits"] == {"memory": 1}


async def test_a_stream_joins_to_the_whole_answer(app: FastAPI, engine: Engine) -> None:
    body = chat(QUESTION, documents=DOCUMENTS, max_tokens=12)
    whole = await post(app, body)
    *chunks, done = await post(
        app, {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    usage = chunks.pop()["usage"]
    deltas = [one["choices"][0]["delta"].get("content", "") for one in chunks]
    assert (done, "".join(deltas)) == ("[DONE]", whole["choices"][0]["message"]["content"])
    reasons = [one["choices"][0]["finish_reason"] for one in chunks]
    assert (reasons[-1], {*reasons[:-1]}) == (whole["choices"][0]["finish_reason"], {None})
    tokens = len(engine.tokenize(QUESTION, DOCUMENTS).all)
    assert usage["prompt_tokens"] == tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert chunks[-1]["kvcache"]["reused_tokens"] > 0


async def test_earlier_turns_stand_behind_the_documents(app: FastAPI, engine: Engine) -> None:
    turns = [
        {"role": "user", "content": "Who keeps the old map?"},
        {"role": "assistant", "content": "Sorin"},
    ]
    messages = [*turns, {"role": "user", "content": QUESTION}]
    for _ in range(2):
        body = await post(app, {**chat(), "messages": messages, "documents": DOCUMENTS})
    expected = engine.generate(QUESTION, DOCUMENTS, history=turns)
    assert body["choices"][0]["message"]["content"] == expected.text
    assert body["usage"]["prompt_tokens"] == expected.metrics.prompt_tokens
    assert body["kvcache"]["hits"] == {"memory": 3}


async def test_nothing_found_is_still_a_question_over_documents(
    app: FastAPI, engine: Engine
) -> None:
    body = await post(app, chat(QUESTION, documents=[]))
    expected = engine.generate(QUESTION)
    assert body["choices"][0]["message"]["content"] == expected.text
    assert body["usage"]["prompt_tokens"] == expected.metrics.prompt_tokens
