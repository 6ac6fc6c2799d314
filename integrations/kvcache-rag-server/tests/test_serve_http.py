"""What a body asks of a backend, and what an answer looks like on the wire."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serve_fakes import answer, chat, client, data_of, running, scripted
from serve_process import CHAT, posted

from kvcache_rag.policies import policy_by_name
from kvcache_rag.prompt.template import Message
from kvcache_rag_server import startup, status
from kvcache_rag_server.keys import new_key
from kvcache_rag_server.requests import RequestModel
from kvcache_rag_server.responses import cached_tokens
from kvcache_rag_server.settings import RequestLimits

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag_server.backend import BackendRequest

COMPLETIONS = "/v1/completions"


async def asked(body: dict[str, Any], path: str = CHAT, **settings: Any) -> BackendRequest:
    """The request that a backend gets for a body."""
    reply, backend = await posted(body, path, **settings)
    assert reply.status_code == 200, reply.text
    return backend.works[0]


# ---------------------------------------------------------------------- documents of an ingestion
async def test_documents_are_handed_on_to_be_prefilled() -> None:
    app, backend = scripted(limits=RequestLimits(max_documents=2))
    body = {"documents": ["a", {"id": "x", "text": "bc", "score": 1}, "a", " "]}
    async with client(app) as http:
        reply = await http.post("/v1/prefill", json=body)
        wrong = await http.post("/v1/prefill", json={**body, "model": "other"})
        many = await http.post("/v1/prefill", json={"documents": ["a", "b", "c"]})
    told = {"object": "prefill", "model": "tiny", "chunks": 2, "tokens": 3, "computed": 2}
    assert reply.json() == told
    (work,) = backend.works
    assert (work.chunks, work.namespace) == (("a", "bc"), "")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert (many.status_code, many.json()["error"]["code"]) == (413, "request_too_large")


# ---------------------------------------------------------------------- what is asked
async def test_the_last_message_is_asked_behind_the_earlier_ones() -> None:
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Ada.", "refusal": None, "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "And"}]},
        {"role": "user", "content": "where?", "name": "me"},
    ]
    work = await asked({"model": "tiny", "messages": messages, "documents": ["Ada is here."]})
    assert work.question == "And\n\nwhere?"
    assert work.history == (Message("user", "Who?"), Message("assistant", "Ada."))
    assert work.chunks == ("Ada is here.",)
    assert (work.is_chat, work.is_plain, work.system) == (False, False, ())
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", work.id)


def kinds(of: type[RequestModel] = RequestModel) -> list[type[RequestModel]]:
    return [of, *(kind for below in of.__subclasses__() for kind in kinds(below))]


NAMES = {"of_another_version", *(name for kind in kinds() for name in kind.model_fields)}
DOCUMENTS = ["a", {"text": "b"}, {"data": "c"}, {"data": {"d": None}}]
QUESTION = {"role": "user", "content": [{"type": "text", "text": "Who?"}]}
ASKED = chat(
    messages=[{"role": "assistant", "content": "Ada."}, QUESTION],
    documents=DOCUMENTS,
    kvcache={},
    response_format={"type": "text"},
)


def with_nulls(sent: Any) -> Any:
    """A body with null for each field that any object of it leaves out."""
    if isinstance(sent, list):
        return [*map(with_nulls, sent)]
    if not isinstance(sent, dict):
        return sent
    given = {name: one if name == "data" else with_nulls(one) for name, one in sent.items()}
    return {**dict.fromkeys(NAMES), **given}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ASKED),
        (CHAT, {**ASKED, "stream": True, "stream_options": {}}),
        (CHAT, chat()),
        (COMPLETIONS, {"model": "tiny", "prompt": "Who?"}),
        (COMPLETIONS, {"model": "tiny", "prompt": "Who?", "documents": DOCUMENTS}),
        ("/v1/explain", ASKED),
        ("/v1/prefill", {"documents": DOCUMENTS}),
        ("/v1/playground/compare", {"full": "a b", "stitched": "a c"}),
    ],
)
async def test_a_field_that_is_null_is_not_there(path: str, body: dict[str, Any]) -> None:
    """Clients write one for what they leave out, of newer versions of the protocol, too."""
    works, replies = [], []
    for sent in (body, with_nulls(body)):
        reply, backend = await posted(sent, path)
        assert reply.status_code == 200, reply.text
        replies.append(reply)
        works.append([replace(one, id="", trace={}) for one in backend.works])
    assert works[0] == works[1]
    if path == CHAT and "documents" in body:
        assert works[1][0].chunks == ("a", "b", "c", "d: null"), "data has nulls of its own"
    if "stream" not in body:
        assert replies[0].json().keys() == replies[1].json().keys()


SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Be kind."}
USER = {"role": "user", "content": "Who?"}


@pytest.mark.parametrize(
    ("messages", "documents", "prompt", "system", "history"),
    [
        ([SYSTEM, DEVELOPER, USER], [], None, ("Be brief.", "Be kind."), ()),
        ([DEVELOPER, USER], None, None, (), (Message("system", "Be kind."),)),
        ([USER], None, "Be fair.", (), (Message("system", "Be fair."),)),
        ([SYSTEM, USER], None, "Be fair.", (), (Message("system", "Be brief."),)),
    ],
    ids=["over documents", "a conversation", "the server's", "the client's"],
)
async def test_instructions_are_told_apart_from_turns_over_documents_only(
    messages: Any, documents: Any, prompt: str | None, system: Any, history: Any
) -> None:
    body = {"model": "tiny", "messages": messages, "documents": documents}
    work = await asked(body, system_prompt=prompt)
    assert (work.question, work.system, work.history) == ("Who?", system, history)
    assert (work.chunks, work.is_chat) == ((), documents is None)


async def test_every_form_of_a_document_is_a_chunk() -> None:
    documents = [
        "one",
        {"text": "two"},
        {"id": "c", "title": "Of three", "text": "three"},
        {"id": "d", "data": "four"},
        {"data": {"title": "Of five", "count": 5, "snippet": "five", "tags": {"b": 1, "a": "ü"}}},
        {"data": {"tags": {"a": "ü", "b": 1}, "snippet": "five", "title": "Of five", "count": 5}},
        {"data": {"text": "six"}},
        {"text": "two"},  # again
        " \n",
    ]
    work = await asked(chat(documents=documents))
    five = 'count: 5\nsnippet: five\ntags: {"a": "ü", "b": 1}\ntitle: Of five'
    assert work.chunks == ("one", "two", "three", "four", five, "six")


@pytest.mark.parametrize(
    ("path", "asks"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Who?"}]}),
        (COMPLETIONS, {"prompt": "Who?"}),
    ],
)
async def test_documents_bring_their_scores(path: str, asks: dict[str, Any]) -> None:
    documents: list[Any] = [
        {"text": "one", "score": 0.5},
        {"data": {"text": "two"}, "score": -3},
        {"id": "c", "title": "Of three", "text": "three", "score": 2e9},
        {"text": "two", "score": 1},
        {"text": " ", "score": 7},
    ]
    work = await asked({"model": "tiny", **asks, "documents": documents}, path)
    assert (work.chunks, work.scores) == (("one", "two", "three"), (0.5, 1.0, 2e9))
    for without in (["one", {"text": "two", "score": None}], []):
        work = await asked({"model": "tiny", **asks, "documents": without}, path)
        assert work.scores is None


@pytest.mark.parametrize(
    ("default", "given", "policy"),
    [
        (None, None, None),
        (None, {}, None),
        (None, {"policy": " legolink "}, "legolink"),
        (None, {"policy": "cacheblend", "ratio": 0.2}, "cacheblend:0.2"),
        (None, {"policy": "CacheClip", "ratio": 1}, "CacheClip:1.0"),
        ("cacheblend", None, "cacheblend"),
        ("cacheblend", {"policy": "full"}, "full"),
        ("cacheblend:0.2", {"ratio": 0.5}, "cacheblend:0.5"),
        ("cacheclip:0.2,4", {"ratio": 0.5}, "cacheclip:0.5,4"),  # what stands behind it stays
    ],
)
async def test_a_request_names_its_policy_or_its_ratio_or_has_the_servers(
    default: str | None, given: Any, policy: str | None
) -> None:
    changes = {} if default is None else {"policy": default}
    work = await asked(chat(kvcache=given), **changes)
    assert work.policy == (None if policy is None else policy_by_name(policy))


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        ({"temperature": 0, "top_p": 0.5, "seed": 3}, {}),
        ({"temperature": 1e-9}, {}),
        ({"temperature": 0.5}, {"temperature": 0.5, "top_p": 1.0, "top_k": 0}),
        ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9, "top_k": 0}),
        ({"top_p": 1.0}, {}),
        (
            {"temperature": 1, "top_p": 0.9, "top_k": 5, "seed": 7},
            {"temperature": 1, "top_p": 0.9, "top_k": 5, "seed": 7},
        ),
    ],
)
async def test_sampling_is_greedy_unless_it_is_asked_for(given: Any, options: Any) -> None:
    assert (await asked(chat(**given))).options == options


@pytest.mark.parametrize(
    ("path", "given", "tokens", "stop"),
    [
        (CHAT, {"max_tokens": 5, "stop": "."}, 5, (".",)),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6, "stop": ["a", "b"]}, 6, ("a", "b")),
        (CHAT, {}, 128, ()),
        (COMPLETIONS, {}, 16, ()),
    ],
)
async def test_lengths_and_stops(path: str, given: Any, tokens: int, stop: Any) -> None:
    body = {**(chat() if path == CHAT else {"model": "tiny", "prompt": "The"}), **given}
    work = await asked(body, path)
    assert (work.max_new_tokens, work.stop) == (tokens, stop)
    few = RequestLimits(max_answer_tokens=9)
    if not given:
        assert (await asked(body, path, limits=few)).max_new_tokens == 9


async def test_a_completion_continues_a_text_or_asks_over_documents() -> None:
    work = await asked({"model": "tiny", "prompt": ["The"]}, COMPLETIONS)
    assert (work.question, work.is_plain, work.is_chat) == ("The", True, False)
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", work.id)
    work = await asked({"model": "tiny", "prompt": "Who?", "documents": ["Ada."]}, COMPLETIONS)
    assert (work.question, work.is_plain, work.chunks) == ("Who?", False, ("Ada.",))


async def test_what_changes_nothing_is_taken() -> None:
    given = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "user": "u",
        "store": False,
        "metadata": {"a": 1},
        "service_tier": "auto",
        "reasoning_effort": "low",
        "verbosity": "low",
        "prompt_cache_retention": "24h",
    }
    assert (await asked(chat(**given))).question
    assert (await asked(chat(**dict.fromkeys([*given, "audio", "seed", "top_k"])))).question


# ---------------------------------------------------------------------- what is answered
async def test_an_answer_is_openais_object_with_its_costs() -> None:
    reply, backend = await posted(chat())
    body = reply.json()
    costs = body.pop("kvcache")
    assert abs(body.pop("created") - time.time()) < 60
    message = {"role": "assistant", "content": "yes", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": 0, "completion_tokens": 3, "total_tokens": 3}
    assert body == {
        "id": backend.works[0].id,
        "object": "chat.completion",
        "model": "tiny",
        "choices": [choice],
        "usage": usage | {"prompt_tokens_details": {"cached_tokens": 0}},
    }
    assert (costs["queue_wait"], costs["batch"], costs["replica"]) == (0.25, 2, "r1")
    assert costs["policy"] == "Reuse()"
    assert re.fullmatch(r"req_[0-9a-f]{32}", reply.headers["x-request-id"])


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_stream_is_openais_chunks(wanted: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if wanted else {}
    reply, _ = await posted(chat(stream=True, **options))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = data_of(reply.text)
    assert done == "[DONE]"
    assert {one["object"] for one in chunks} == {"chat.completion.chunk"}
    assert len({(one["id"], one["created"], one["model"]) for one in chunks}) == 1
    if wanted:  # it stands alone behind the others, as OpenAI's clients know it
        usage = chunks.pop()
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)
        assert "kvcache" not in usage
    assert [one.get("usage", "none") for one in chunks] == [None if wanted else "none"] * 4
    choices = [one["choices"][0] for one in chunks]
    first = {"role": "assistant", "content": ""}
    assert [one["delta"] for one in choices] == [first, {"content": "y"}, {"content": "es"}, {}]
    assert [one["finish_reason"] for one in choices] == [None, None, None, "stop"]
    assert [one.get("kvcache", {}).get("queue_wait") for one in chunks] == [None] * 3 + [0.25]


async def test_completions_have_objects_of_their_own() -> None:
    body = {"model": "tiny", "prompt": "The"}
    whole = (await posted(body, COMPLETIONS))[0].json()
    streamed, _ = await posted({**body, "stream": True}, COMPLETIONS)
    assert whole["object"] == "text_completion"
    choice = {"index": 0, "text": "yes", "logprobs": None, "finish_reason": "stop"}
    assert whole["choices"] == [choice]
    *chunks, done = data_of(streamed.text)
    assert ("".join(one["choices"][0]["text"] for one in chunks), done) == ("yes", "[DONE]")
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_cached_are_the_chunks_of_the_store_and_the_prefix_before_them() -> None:
    costs = {"prefix_tokens": 8, "prefilled_tokens": 30, "query_tokens": 9}
    cold = answer(**costs).metrics
    assert (cached_tokens(cold), cold.prompt_tokens) == (0, 47)
    partly = answer(**{**costs, "reused_tokens": 10, "prefilled_tokens": 20}).metrics
    assert (cached_tokens(partly), partly.prompt_tokens) == (18, 47)
    rounds = answer(**{**costs, "reused_tokens": 30, "prefilled_tokens": 0, "rounds": 2}).metrics
    assert cached_tokens(rounds) == 46


# ---------------------------------------------------------------------- what is served
async def test_models_and_states() -> None:
    app, backend = scripted(served_name="org/reader")
    async with client(app) as http:
        listed = (await http.get("/v1/models")).json()
        assert [one["id"] for one in listed["data"]] == ["org/reader"]
        assert (await http.get("/v1/models/org/reader")).json() == listed["data"][0]
        assert (await http.get("/v1/models/tiny")).status_code == 404
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert (await http.get("/ready")).json() == {"status": "ready"}
        backend.is_ready = False
        reply = await http.get("/ready")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["code"] == "not_ready"


def test_probes_and_page_answer_head_without_a_body() -> None:
    app, backend = scripted()
    with running(app) as url:
        for path in ("/", "/health", "/ready"):
            whole, head = httpx.get(url + path), httpx.head(url + path)
            assert (head.status_code, head.content) == (200, b"")
            for name in ("content-type", "content-length", "etag"):
                assert head.headers.get(name) == whole.headers.get(name)
        backend.is_ready = False
        assert httpx.head(f"{url}/ready").status_code == 503


async def test_a_backend_that_cannot_say_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> bool:
        raise OSError("gone")

    app, backend = scripted()
    monkeypatch.setattr(backend, "ready", fails)
    async with client(app) as http:
        assert (await http.get("/ready")).status_code == 503
    assert "gone" in caplog.text


async def test_a_backend_that_takes_long_to_say_that_it_is_ready_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hesitates() -> bool:
        await asyncio.sleep(0.05)
        return True

    app, backend = scripted()
    monkeypatch.setattr(backend, "ready", hesitates)
    monkeypatch.setattr(status, "_PATIENCE", 0.001)
    async with client(app) as http:
        assert (await http.get("/ready")).status_code == 503
    announced = asyncio.Event()
    await asyncio.wait_for(startup._announce(app.state.context, announced.set), 5)
    assert announced.is_set()


async def test_the_schema_says_what_the_server_does_and_whether_keys_are_wanted(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys"
    key = new_key(file, "acme")
    for changes, wanted in (({}, False), ({"api_keys": file}, True)):
        app, _ = scripted(**changes)
        async with client(app) as http:
            schema = (await http.get("/openapi.json")).json()
            reply = await http.post(CHAT, json=chat(), headers={"authorization": f"Bearer {key}"})
        assert reply.status_code == 200
        post = schema["paths"][CHAT]["post"]
        assert bool(post.get("security")) is wanted
        assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= set(post["responses"])
        assert set(post["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert "HTTPValidationError" not in schema["components"]["schemas"]
        assert schema["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
