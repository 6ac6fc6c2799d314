"""Every error is OpenAI's object, one sentence that names what was wrong, and no traceback."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from serve_fakes import chat, client, data_of, scripted
from serve_process import CHAT, posted

from kvcache_rag_server.backend import BackendRequest, Event, Failed, Piece, Started

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

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


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"n": 9}, "n", "less than or equal to 8"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tools": [tool("f"), tool("f")]}, "tools", "two tools are named 'f'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [tool("f")], "tool_choice": tool("g")}, "tool_choice", "'g', and there is f"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "pattern"),
        ({"tools": [tool("none")], "tool_choice": tool("none")}, "tool_choice", "rename it"),
        (
            {"tools": [tool("f")], "response_format": {"type": "json_object"}},
            "response_format",
            "held to a response_format and call tools at once",
        ),
        ({"functions": [{}]}, "functions", "functions are not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "goes with logprobs set to true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five.[key]", "pattern"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        (
            {"response_format": {"type": "yaml"}},
            "response_format",
            "type must be text, json_object",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"modalities": ["audio"]}, "modalities[0]", "text only"),
        ({"audio": {"voice": "a"}}, "audio", "text only"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"stop": ["a", "b" * 257]}, "stop[1]", "at most 256"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
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
        ({"kvcache": {"ratoi": 0.2}}, "kvcache.ratoi", "ratoi; did you mean ratio?"),
        ({"documents": [5]}, "documents[0]", "dictionary"),
        ({"documents": ["a", {"title": "t"}]}, "documents[1].text", "missing"),
        (
            {"documents": [{"text": "a", "url": "u"}]},
            "documents[0].url",
            "no field documents[0].url; leave it out",
        ),
        (
            {"documents": ["a", {"text": "b", "score": 1}]},
            "documents",
            "1 of 2 documents have a score; give every document one, or none",
        ),
        ({"documents": [{"text": "a", "score": "1"}]}, "documents[0].score", "number"),
        ({"documents": [{"text": "a", "score": 10**400}]}, "documents[0].score", "number"),
        ({"messages": [{"role": "robot", "content": "a"}, USER]}, "messages[0].role", "or tool"),
        ({"messages": [USER, {"role": "tool", "content": "a"}]}, "messages[1]", "tool_call_id"),
        (
            {"messages": [USER, {"role": "tool", "content": "a", "tool_call_id": "1"}]},
            "messages[1].tool_call_id",
            "no message before it has a call with the tool_call_id '1'",
        ),
        (
            {"messages": [{**USER, "tool_call_id": "1"}]},
            "messages[0].tool_call_id",
            "belong to messages of the role tool, not user",
        ),
        (
            {"messages": [call("[1]"), USER]},
            "messages[0].tool_calls[0]",
            "an object in JSON",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "messages[1]", "the user's"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages[0]", "have text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "no images",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}, USER]},
            "messages[0].tool_calls[0].function",
            "missing",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_named(changes: Any, param: str, says: str) -> None:
    reply, backend = await posted({**chat(), **changes})
    error = error_of(reply, 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]
    assert not backend.works


async def test_a_score_that_no_json_has_is_none() -> None:
    body = json.dumps(chat(documents=[{"text": "a", "score": 1.0}]))
    for wrong in ("NaN", "Infinity", "1e999"):
        reply, _ = await posted(body.replace("1.0", wrong))
        assert error_of(reply, 400)["param"] == "documents[0].score"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "a"}, "suffix"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": " ", "documents": ["a"]}, "prompt"),
        ({"messages": [USER]}, "messages"),
        ({"stop": ["a" * 257]}, "stop"),
        ({"kvcache": {"policy": "|".join(["cacheblend:0.5"] * 20)}}, "kvcache.policy"),
    ],
)
async def test_completions_refuse_what_they_cannot_do(changes: Any, param: str) -> None:
    reply, _ = await posted({"model": "tiny", "prompt": "The", **changes}, "/v1/completions")
    assert error_of(reply, 400)["param"].startswith(param)


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
    reply, _ = await posted({**chat(), **changes})
    assert "unicode" in error_of(reply, 400)["message"].lower()


async def test_what_is_not_there_is_told_as_at_openai() -> None:
    app, _ = scripted()
    async with client(app) as http:
        error = error_of(await http.post(CHAT, json={**chat(), "model": "gpt"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'tiny'" in error["message"]
        assert error_of(await http.get("/v1/nothing"), 404)["code"] == "unknown_url"
        reply = await http.get(CHAT)
        assert error_of(reply, 405)["code"] == "method_not_allowed"
        assert reply.headers["allow"] == "POST"
        error_of(await http.delete("/v1/models"), 405)


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
    reply, _ = await posted(chat(stream=streaming), script=is_full)
    error = error_of(reply, 503)
    assert (error["type"], error["message"]) == ("overloaded", "too many wait")
    assert reply.headers["retry-after"] == "2"


async def test_a_failure_behind_it_is_an_event_and_the_end() -> None:
    whole, _ = await posted(chat(), script=fails_late)
    reply, _ = await posted(chat(stream=True), script=fails_late)
    assert reply.status_code == 200
    _, text, error, done = data_of(reply.text)
    assert text["choices"][0]["delta"] == {"content": "ye"}
    assert (error, done) == ({"error": error_of(whole, 500)}, "[DONE]")


@pytest.mark.parametrize("script", [breaks, ends])
@pytest.mark.parametrize("streaming", [True, False])
async def test_what_nobody_expected_is_in_the_log_only(
    script: Any, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reply, _ = await posted(chat(stream=streaming), script=script)
    name = reply.headers["x-request-id"]
    said = f"the server failed on this request; its log says why under {name}"
    assert error_of(reply, 500)["message"] == said
    assert next(one for one in caplog.records if name in one.getMessage()).exc_info
    assert ("secret /path" in caplog.text) is (script is breaks)
    assert "secret" not in reply.text
