"""The server over the packaged reader: the same answers as the engine's, and what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from serve_fakes import chat, client, data_of, settings, tiny_backend

from kvcache_rag import Engine
from kvcache_rag.policies import policy_by_name
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


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"policy": "cacheblend", "ratio": 0.2}, "cacheblend:0.2"),
        ({"policy": "legolink:4"}, "legolink:4"),
        ({"policy": "full"}, "full"),
        ({"policy": "combination"}, "combination"),
    ],
)
async def test_each_request_has_its_policy(
    app: FastAPI, engine: Engine, given: dict[str, Any], name: str
) -> None:
    bodies = [await post(app, chat(QUESTION, documents=DOCUMENTS, kvcache=given)) for _ in "12"]
    expected = engine.generate(QUESTION, DOCUMENTS, policy=policy_by_name(name))
    for body in bodies:
        assert body["kvcache"]["policy"] == expected.metrics.policy
        assert body["choices"][0]["message"]["content"] == expected.text
        assert body["kvcache"]["recomputed_tokens"] == expected.metrics.recomputed_tokens
    if name == "full":  # nothing of it comes from a store
        cached = bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == bodies[1]["kvcache"]["continued_tokens"]


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


async def test_another_instruction_stands_before_the_question(app: FastAPI, engine: Engine) -> None:
    def asked(system: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, *chat(QUESTION)["messages"]]
        return {**chat(), "messages": messages, "documents": DOCUMENTS}

    own = await post(app, asked(engine.template.system))
    other = await post(app, asked("Answer in one word."))
    assert (own["kvcache"]["prefix_mismatch"], other["kvcache"]["prefix_mismatch"]) == (False, True)
    assert other["kvcache"]["hits"] == {"memory": 3}  # the chunks are the same all the same
    expected = engine.generate(f"Answer in one word.\n\n{QUESTION}", DOCUMENTS)
    assert other["choices"][0]["message"]["content"] == expected.text
    assert other["usage"]["prompt_tokens"] == expected.metrics.prompt_tokens


async def test_without_documents_a_chat_is_a_conversation(app: FastAPI, engine: Engine) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
    ]
    body = await post(app, {"model": "tiny", "messages": messages, "max_tokens": 8})
    expected = engine.complete(engine.render_chat(messages), max_new_tokens=8)
    assert body["choices"][0]["message"]["content"] == expected.text
    assert body["usage"]["prompt_tokens"] == expected.metrics.prompt_tokens
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_nothing_found_is_still_a_question_over_documents(
    app: FastAPI, engine: Engine
) -> None:
    body = await post(app, chat(QUESTION, documents=[]))
    expected = engine.generate(QUESTION)
    assert body["choices"][0]["message"]["content"] == expected.text
    assert body["usage"]["prompt_tokens"] == expected.metrics.prompt_tokens


async def test_a_completion_continues_the_prompt_as_it_is(app: FastAPI, engine: Engine) -> None:
    body = await post(app, {"model": "tiny", "prompt": "The red lamp"}, COMPLETIONS)
    expected = engine.complete("The red lamp", max_new_tokens=16)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    asked = {"model": "tiny", "prompt": QUESTION, "documents": DOCUMENTS}
    grounded = await post(app, asked, COMPLETIONS)
    text = engine.generate(QUESTION, DOCUMENTS, max_new_tokens=16).text
    assert grounded["choices"][0]["text"] == text


async def test_answers_end_at_their_stops_and_lengths(app: FastAPI, engine: Engine) -> None:
    text = engine.generate(QUESTION, DOCUMENTS).text
    stop = text[len(text) // 2 :]
    body = await post(app, chat(QUESTION, documents=DOCUMENTS, stop=[stop]))
    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (
        text[: text.index(stop)],
        "stop",
    )
    body = await post(app, chat(QUESTION, documents=DOCUMENTS, max_tokens=1))
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("streaming", [True, False])
async def test_too_long_a_prompt_is_a_bad_request(app: FastAPI, streaming: bool) -> None:
    async with client(app) as http:
        body = chat(QUESTION, documents=["long " * 5000], stream=streaming)
        reply = await http.post(CHAT, json=body)
    assert reply.status_code == 400
    assert "context window" in reply.json()["error"]["message"]


async def test_a_policy_that_needs_more_than_there_is_is_a_bad_request(app: FastAPI) -> None:
    async with client(app) as http:
        body = chat(QUESTION, documents=DOCUMENTS, kvcache={"policy": "cacheclip"})
        reply = await http.post(CHAT, json=body)
    assert reply.status_code == 400
    assert "auxiliary" in reply.json()["error"]["message"]
