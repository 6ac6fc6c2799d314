"""The clients that people have: OpenAI's own, LangChain's and LlamaIndex's, over a real server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from serve_fakes import DEADLINE, running, scripted, settings, tiny_backend

from kvcache_rag import Engine
from kvcache_rag_server.app import build_app
from kvcache_rag_server.backend import BackendRequest, Event, Failed, Piece, Started

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

QUESTION = "Where does Bralo keep the red lamp?"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("kv")
    with tiny_backend(folder) as backend, running(build_app(backend, settings())) as found:
        yield f"{found}/v1"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("tiny", device="cpu")


def documents(name: str) -> list[Any]:
    """Documents that no other test has asked about, one of each form."""
    return [
        f"{name} keeps the red lamp in the hall.",
        {"id": "b", "title": "Cups", "text": f"The blue cup belongs to {name}."},
        {"id": "c", "data": f"{name} keeps the old map in the cellar."},
    ]


def texts(name: str) -> list[str]:
    """The chunks of `documents`."""
    first, second, third = documents(name)
    return [first, second["text"], third["data"]]


def chunk_tokens(engine: Engine, name: str) -> int:
    ids = engine.tokenize(QUESTION, texts(name))
    return len(ids.prefix) + sum(map(len, ids.chunks))


# ---------------------------------------------------------------------- openai
@pytest.fixture
def sync(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
        yield client


USER: Any = [{"role": "user", "content": QUESTION}]


def test_openai_finds_the_model(sync: openai.OpenAI) -> None:
    assert [one.id for one in sync.models.list()] == ["tiny"]
    assert sync.models.retrieve("tiny").owned_by == "kvcache-rag"


def test_openai_answers_over_documents(sync: openai.OpenAI, engine: Engine) -> None:
    extra = {"documents": documents("Bralo"), "kvcache": {"policy": "legolink"}}
    cold, warm = (
        sync.chat.completions.create(model="tiny", messages=USER, extra_body=extra) for _ in "12"
    )
    expected = engine.generate(QUESTION, texts("Bralo"))
    for one in (cold, warm):
        assert one.usage is not None
        assert one.usage.prompt_tokens == expected.metrics.prompt_tokens
        assert one.choices[0].finish_reason in ("stop", "length")
        assert one.model_extra is not None
        assert one.model_extra["kvcache"]["policy"].startswith("LegoLink")
    assert cold.choices[0].message.content == warm.choices[0].message.content
    cached = [one.usage.prompt_tokens_details.cached_tokens for one in (cold, warm)]  # type: ignore[union-attr]  # checked above
    assert cached == [0, chunk_tokens(engine, "Bralo")]
    assert cold._request_id is not None
    assert cold._request_id.startswith("req_")


def test_openai_streams(sync: openai.OpenAI, engine: Engine) -> None:
    extra = {"documents": documents("Mira")}
    for cached in (0, chunk_tokens(engine, "Mira")):
        chunks = [
            *sync.chat.completions.create(
                model="tiny",
                messages=USER,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=extra,
            )
        ]
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert text == engine.generate(QUESTION, texts("Mira")).text
        assert chunks[0].choices[0].delta.role == "assistant"
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        found = usage.prompt_tokens_details.cached_tokens
        assert found >= cached
        assert bool(found) is bool(cached)


def test_openai_completes(sync: openai.OpenAI, engine: Engine) -> None:
    expected = engine.complete("The red lamp", max_new_tokens=8).text
    whole = sync.completions.create(model="tiny", prompt="The red lamp", max_tokens=8)
    assert whole.choices[0].text == expected
    pieces = sync.completions.create(model="tiny", prompt="The red lamp", max_tokens=8, stream=True)
    assert "".join(one.choices[0].text for one in pieces) == expected


def test_openai_knows_the_errors(sync: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sync.chat.completions.create(model="gpt", messages=USER)
    assert missing.value.code == "model_not_found"
    long = {"documents": ["long " * 5000]}
    with pytest.raises(openai.BadRequestError, match="context window") as wrong:
        sync.chat.completions.create(model="tiny", messages=USER, stream=True, extra_body=long)
    assert wrong.value.code == "context_length_exceeded"


def test_openai_passes_over_comments_and_raises_a_late_error() -> None:
    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        await asyncio.sleep(0.1)  # several times the heartbeat
        yield Started(0.0)
        yield Piece("ye")
        await asyncio.sleep(0.1)
        yield Failed(500, "server_error", "the replica has gone")

    app, _ = scripted(script, heartbeat=0.02)
    with (
        running(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.create(model="tiny", messages=USER, stream=True) as chunks,
    ):
        deltas = (one.choices[0].delta.content for one in chunks)
        assert [next(deltas), next(deltas)] == ["", "ye"]
        with pytest.raises(openai.APIError, match="the replica has gone"):
            next(deltas)


# ---------------------------------------------------------------------- LangChain
@pytest.fixture
def langchain(url: str) -> Iterator[Any]:
    with httpx.Client(timeout=DEADLINE) as client:
        made: Any = ChatOpenAI
        yield made(
            model="tiny",
            base_url=url,
            api_key="none",
            http_client=client,
            stream_usage=True,
            extra_body={"documents": documents("Tano")},
        )


def test_langchain_invokes_and_streams(langchain: Any, engine: Engine) -> None:
    expected = engine.generate(QUESTION, texts("Tano"))
    answers = [langchain.invoke(QUESTION) for _ in "12"]
    assert [one.content for one in answers] == [expected.text] * 2
    read = [one.usage_metadata["input_token_details"]["cache_read"] for one in answers]
    assert read[0] == 0
    assert read[1] >= chunk_tokens(engine, "Tano")
    whole = None
    for piece in langchain.stream(QUESTION):
        whole = piece if whole is None else whole + piece
    assert whole.content == expected.text
    assert whole.usage_metadata["input_tokens"] == expected.metrics.prompt_tokens
    assert whole.response_metadata["finish_reason"] == expected.finish_reason


# ---------------------------------------------------------------------- LlamaIndex
@pytest.fixture
def llama(url: str) -> Iterator[OpenAILike]:
    with httpx.Client(timeout=DEADLINE) as client:
        yield OpenAILike(
            model="tiny",
            api_base=url,
            api_key="none",
            is_chat_model=True,
            temperature=0.0,
            max_tokens=32,
            max_retries=0,
            http_client=client,
            additional_kwargs={"extra_body": {"documents": documents("Kelo")}},
        )


def test_llama_index_chats_and_streams(llama: OpenAILike, engine: Engine) -> None:
    expected = engine.generate(QUESTION, texts("Kelo"), max_new_tokens=32)
    message = ChatMessage(role="user", content=QUESTION)
    answers = [llama.chat([message]) for _ in "12"]
    assert [one.message.content for one in answers] == [expected.text] * 2
    details = answers[1].raw.usage.prompt_tokens_details
    assert details.cached_tokens >= chunk_tokens(engine, "Kelo")
    *_, last = llama.stream_chat([message])
    assert last.message.content == expected.text
    assert llama.complete(QUESTION).text == expected.text
    *_, last = llama.stream_complete(QUESTION)
    assert last.text == expected.text
