"""Every error is OpenAI's object, one sentence that names what was wrong, and no traceback."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from serve_fakes import chat, client, data_of, scripted, settings, tiny_backend

from kvcache_rag_server.app import build_app
from kvcache_rag_server.backend import BackendRequest, Event, Failed, Piece, Started

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvcache_rag_server.local import LocalBackend

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Who?"}


def error_of(reply: Any, status: int) -> dict[str, Any]:
    """The error object of a reply."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in reply.text
    assert "\n" not in body["error"]["message"]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"n": 2}, "n", "n out"),
        ({"tools": [{"type": "function"}]}, "tools", "tools are not supported"),
        ({"tool_choice": "required"}, "tool_choice", "tools are not supported"),
        ({"functions": [{}]}, "functions", "functions are not supported"),
        ({"logprobs": True}, "logprobs", "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty", "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty", "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "plain text"),
        ({"modalities": ["audio"]}, "modalities[0]", "text only"),
        ({"audio": {"voice": "a"}}, "audio", "text only"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"stop": list("abcde")}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "at least 1"),
        ({"stop": "a" * 257}, "stop", "at most 256"),
        ({"stop": ["a", "b" * 257]}, "stop[1]", "at most 256"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "streams only"),
        ({"docments": 1}, "docments", "there is no field docments; did you mean documents?"),
        ({"model": None}, "model", "missing"),
        ({"kvcache": {"policy": "cacheblnd"}}, "kvcache.policy", "did you mean cacheblend"),
        ({"kvcache": {"policy": "nonsense"}}, "kvcache.policy", "legolink"),
        ({"kvcache": {"policy": "reuse" + " " * 200}}, "kvcache.policy", "at most 200"),
        ({"kvcache": {"policy": "legolink", "ratio": 0.2}}, "kvcache.ratio", "cacheblend"),
        ({"kvcache": {"policy": "cacheblend:0.1", "ratio": 0.2}}, "kvcache.ratio", "has none"),
        ({"kvcache": {"ratio": 0.2}}, "kvcache.ratio", "none is named"),
        ({"kvcache": {"policy": "cacheblend", "ratio": 2}}, "kvcache.ratio", "less than"),
        (
            {"kvcache": {"ratoi": 0.2}},
            "kvcache.ratoi",
            "ratoi; did you mean ratio?",
        ),
        ({"documents": "text"}, "documents", "list"),
        ({"documents": [5]}, "documents[0]", "dictionary"),
        ({"documents": ["a", {"title": "t"}]}, "documents[1].text", "missing"),
        (
            {"documents": [{"text": "a", "url": "u"}]},
            "documents[0].url",
            "no field documents[0].url; leave it out",
        ),
        ({"documents": [{"data": 5}]}, "documents[0].data", "dictionary"),
        (
            {"documents": ["a", {"text": "b", "score": 1}]},
            "documents",
            "1 of 2 documents have a score; give every document one, or none",
        ),
        ({"documents": [{"text": "a", "score": "1"}]}, "documents[0].score", "number"),
        ({"documents": [{"text": "a", "score": True}]}, "documents[0].score", "number"),
        ({"documents": [{"text": "a", "score": 10**400}]}, "documents[0].score", "number"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "a"}, USER]}, "messages[0].role", "tools"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "messages[1]", "the user's"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages[0]", "have text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "no images",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}, USER]},
            "messages[0].tool_calls",
            "tools",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_named(changes: Any, param: str, says: str) -> None:
    app, backend = scripted()
    async with client(app) as http:
        error = error_of(await http.post(CHAT, json={**chat(), **changes}), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]
    assert not backend.works


async def test_a_score_that_no_json_has_is_none() -> None:
    app, _ = scripted()
    body = json.dumps(chat(documents=[{"text": "a", "score": 1.0}]))
    async with client(app) as http:
        for wrong in ("NaN", "Infinity", "1e999"):
            content = body.replace("1.0", wrong)
            reply = await http.post(
                CHAT, content=content, headers={"content-type": "application/json"}
            )
            assert error_of(reply, 400)["param"] == "documents[0].score"


@pytest.mark.parametrize(
    ("path", "asks"),
    [
        (CHAT, {"messages": [USER]}),
        (COMPLETIONS, {"prompt": "Who?"}),
        ("/v1/explain", {"messages": [USER], "documents": []}),
    ],
)
async def test_texts_that_cost_by_their_length_are_short_everywhere(path: str, asks: Any) -> None:
    app, backend = scripted()
    async with client(app) as http:
        for field, wrong in (
            ("kvcache", {"policy": "|".join(["cacheblend:0.5"] * 20)}),
            ("stop", ["a" * 257]),
        ):
            body = {"model": "tiny", **asks, field: wrong}
            assert error_of(await http.post(path, json=body), 400)["param"].startswith(field)
    assert not backend.works


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "a"}, "suffix"),
        ({"logprobs": 2}, "logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": " ", "documents": ["a"]}, "prompt"),
        ({"messages": [USER]}, "messages"),
    ],
)
async def test_completions_refuse_what_they_cannot_do(changes: Any, param: str) -> None:
    app, _ = scripted()
    async with client(app) as http:
        body = {"model": "tiny", "prompt": "The", **changes}
        error = error_of(await http.post(COMPLETIONS, json=body), 400)
    assert error["param"].startswith(param)


@pytest.mark.parametrize(
    "body",
    [
        b'{"\\ud800": 1}',
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"a"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": 1e999}',
    ],
)
async def test_no_body_is_too_odd(body: bytes) -> None:
    app, _ = scripted()
    async with client(app) as http:
        headers = {"content-type": "application/json"}
        error_of(await http.post(CHAT, content=body, headers=headers), 400)
        error_of(await http.post(CHAT, content=body, headers={"content-type": "text/plain"}), 400)


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
        {"documents": ["\ud800"]},
        {"documents": [{"text": "\ud800"}]},
        {"documents": [{"data": "\ud800"}]},
        {"documents": [{"data": {"a": ["\ud800"]}}]},
        {"documents": [{"data": {"\ud800": "a"}}]},
        {"stop": "\ud800"},
        {"model": "\ud800"},
        {"kvcache": {"policy": "cacheclip:\ud800,1,2"}},
    ],
)
async def test_half_a_character_is_refused_and_not_sent_back(changes: Any) -> None:
    app, _ = scripted()
    body = json.dumps({**chat(), **changes})
    async with client(app) as http:
        headers = {"content-type": "application/json"}
        error = error_of(await http.post(CHAT, content=body, headers=headers), 400)
    assert "unicode" in error["message"].lower()


async def test_another_model_is_not_found_as_at_openai() -> None:
    app, _ = scripted()
    async with client(app) as http:
        error = error_of(await http.post(CHAT, json={**chat(), "model": "gpt"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'tiny'" in error["message"]


async def test_paths_and_methods() -> None:
    app, _ = scripted()
    async with client(app) as http:
        assert error_of(await http.get("/v1/nothing"), 404)["code"] == "unknown_url"
        reply = await http.get(CHAT)
        assert error_of(reply, 405)["code"] == "method_not_allowed"
        assert reply.headers["allow"] == "POST"
        error_of(await http.delete("/v1/models"), 405)


@pytest.mark.parametrize("path", ["/v1/models/tiny", "/v1/models", "/health", "/metrics", CHAT])
async def test_a_path_that_ends_in_a_line_break_is_another_path(path: str) -> None:
    app, backend = scripted()
    async with client(app) as http:
        for reply in (await http.get(f"{path}%0a"), await http.post(f"{path}%0a", json=chat())):
            assert error_of(reply, 404)["code"] == "unknown_url"
            assert reply.headers["x-request-id"].startswith("req_")
    assert not backend.works


# ---------------------------------------------------------------------- what a backend says
async def fails_late(work: BackendRequest) -> AsyncGenerator[Event, None]:
    yield Started(0.0)
    yield Piece("ye")
    yield Failed(500, "server_error", "the replica has gone")


async def is_full(work: BackendRequest) -> AsyncGenerator[Event, None]:
    yield Failed(503, "overloaded", "too many wait", retry_after=2.4)


async def breaks(work: BackendRequest) -> AsyncGenerator[Event, None]:
    raise ZeroDivisionError("secret /path")
    yield Started(0.0)


async def ends(work: BackendRequest) -> AsyncGenerator[Event, None]:
    yield Started(0.0)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_failure_before_the_first_token_has_its_status(streaming: bool) -> None:
    app, _ = scripted(is_full)
    async with client(app) as http:
        reply = await http.post(CHAT, json=chat(stream=streaming))
    error = error_of(reply, 503)
    assert (error["type"], error["message"]) == ("overloaded", "too many wait")
    assert reply.headers["retry-after"] == "2"


@pytest.mark.parametrize("path", [CHAT, "/v1/explain"])
@pytest.mark.parametrize("words", [4_000, 100_000])
def test_too_long_a_prompt_has_openais_code(path: str, words: int) -> None:
    """Clients shorten a conversation when they read it."""
    body = chat(documents=["a lamp " * words])

    async def ask(backend: LocalBackend) -> Any:
        async with client(build_app(backend, settings())) as http:
            return await http.post(path, json=body)

    with tiny_backend() as backend:
        error = error_of(asyncio.run(ask(backend)), 400)
    assert error["code"] == "context_length_exceeded"
    assert "context window" in error["message"]


async def test_a_failure_behind_it_is_an_event_and_the_end() -> None:
    app, _ = scripted(fails_late)
    async with client(app) as http:
        reply = await http.post(CHAT, json=chat(stream=True))
        whole = error_of(await http.post(CHAT, json=chat()), 500)
    assert reply.status_code == 200
    role, text, error, done = data_of(reply.text)
    assert (role["choices"][0]["delta"]["role"], text["choices"][0]["delta"]) == (
        "assistant",
        {"content": "ye"},
    )
    assert (error, done) == ({"error": whole}, "[DONE]")


@pytest.mark.parametrize("script", [breaks, ends])
@pytest.mark.parametrize("streaming", [True, False])
async def test_what_nobody_expected_is_in_the_log_only(
    script: Any, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    app, _ = scripted(script)
    async with client(app) as http:
        with caplog.at_level(logging.ERROR, "kvcache_rag_server"):
            reply = await http.post(CHAT, json=chat(stream=streaming))
    error = error_of(reply, 500)
    name = reply.headers["x-request-id"]
    assert error["message"] == f"the server failed on this request; its log says why under {name}"
    record = next(one for one in caplog.records if name in one.getMessage())
    assert record.exc_info
    if script is breaks:
        assert "secret /path" in caplog.text
        assert "secret" not in reply.text


async def test_a_route_that_breaks_is_caught_too(caplog: pytest.LogCaptureFixture) -> None:
    app, _backend = scripted()

    @app.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError("secret")

    async with client(app) as http:
        reply = await http.get("/broken")
    error = error_of(reply, 500)
    assert reply.headers["x-request-id"] in error["message"]
    assert reply.headers["x-request-id"] in caplog.text
    assert "secret" not in reply.text
