"""What a body asks of a backend, and what an answer looks like on the wire."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serve_fakes import answer, chat, client, data_of, running, scripted

from kvcache_rag.policies import policy_by_name
from kvcache_rag.prompt.template import Message
from kvcache_rag_server.keys import new_key
from kvcache_rag_server.requests import DataDocument, Sent, TextDocument, texts
from kvcache_rag_server.responses import cached_tokens
from kvcache_rag_server.settings import RequestLimits

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag_server.backend import BackendRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def asked(body: dict[str, Any], path: str = CHAT, **settings: Any) -> BackendRequest:
    """The request that a backend gets for a body."""
    app, backend = scripted(**settings)
    async with client(app) as http:
        reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return backend.works[0]


# ---------------------------------------------------------------------- documents of an ingestion
async def test_documents_are_handed_on_to_be_prefilled() -> None:
    app, backend = scripted(limits=RequestLimits(max_documents=2))
    body = {"documents": ["a", {"id": "x", "text": "bc"}, "a", " "]}
    async with client(app) as http:
        reply = await http.post("/v1/prefill", json=body)
        wrong = await http.post("/v1/prefill", json={**body, "model": "other"})
        many = await http.post("/v1/prefill", json={"documents": ["a", "b", "c"]})
        models = await http.get("/v1/models")
    assert reply.json() == {
        "object": "prefill", "model": "tiny", "chunks": 2, "tokens": 3, "computed": 2,
    }  # fmt: skip
    (work,) = backend.works
    assert (work.chunks, work.namespace) == (("a", "bc"), "")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert (many.status_code, many.json()["error"]["code"]) == (413, "request_too_large")
    assert models.json()["data"][0]["max_model_len"] == 512


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


def kinds(of: type[Sent] = Sent) -> list[type[Sent]]:
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
        app, backend = scripted()
        async with client(app) as http:
            reply = await http.post(path, json=sent)
        assert reply.status_code == 200, reply.text
        replies.append(reply)
        works.append([replace(one, id="", trace={}) for one in backend.works])
    assert works[0] == works[1]
    if "stream" not in body:
        assert replies[0].json().keys() == replies[1].json().keys()


async def test_a_document_has_the_nulls_of_its_data() -> None:
    assert (await asked(with_nulls(ASKED))).chunks == ("a", "b", "c", "d: null")


async def test_with_documents_instructions_are_told_apart_from_turns() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Who?"},
    ]
    work = await asked({"model": "tiny", "messages": messages, "documents": []})
    assert (work.system, work.question) == (("Be brief.", "Be kind."), "Who?")
    assert (work.history, work.chunks, work.is_chat) == ((), (), False)


async def test_without_documents_it_is_a_conversation() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    work = await asked({"model": "tiny", "messages": messages, "documents": None})
    assert work.is_chat
    assert work.history == (Message("system", "Be brief."),)
    opened = await asked(chat("Who?"), system_prompt="Be kind.")
    assert opened.history == (Message("system", "Be kind."),)
    own = await asked({"model": "tiny", "messages": messages}, system_prompt="Be kind.")
    assert own.history == (Message("system", "Be brief."),)


async def test_every_form_of_a_document_is_a_chunk() -> None:
    documents = [
        "one",
        {"text": "two"},
        {"id": "c", "title": "Of three", "text": "three"},
        {"id": "d", "data": "four"},
        {"data": {"title": "Of five", "count": 5, "snippet": "five", "tags": {"b": 1, "a": "ü"}}},
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


async def test_a_document_that_is_prefilled_may_keep_its_score() -> None:
    app, backend = scripted()
    async with client(app) as http:
        reply = await http.post("/v1/prefill", json={"documents": [{"text": "a", "score": 1}, "b"]})
    assert reply.status_code == 200
    assert backend.works[0].chunks == ("a", "b")


def test_fields_read_the_same_in_any_order() -> None:
    one = DataDocument(data={"b": "2", "a": {"d": 1, "c": [None, True]}})
    two = DataDocument(data={"a": {"c": [None, True], "d": 1}, "b": "2"})
    assert texts([one, two]) == ('a: {"c": [null, true], "d": 1}\nb: 2',)


def test_a_title_is_no_part_of_a_chunk() -> None:
    named = TextDocument(id="1", title="Lamps", text="The lamp.")
    assert texts([named, "The lamp."]) == ("The lamp.",)


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        (None, None),
        ({}, None),
        ({"policy": "legolink"}, "legolink"),
        ({"policy": " legolink "}, "legolink"),
        ({"policy": "cacheblend", "ratio": 0.2}, "cacheblend:0.2"),
        ({"policy": "CacheClip", "ratio": 1}, "CacheClip:1.0"),
    ],
)
async def test_a_request_names_its_policy(given: Any, policy: str | None) -> None:
    expected = None if policy is None else policy_by_name(policy)
    assert (await asked(chat(kvcache=given))).policy == expected


@pytest.mark.parametrize(
    ("default", "given", "policy"),
    [
        ("cacheblend", None, "cacheblend"),
        ("cacheblend", {"policy": "full"}, "full"),
        ("cacheblend", {"ratio": 0.5}, "cacheblend:0.5"),
        ("cacheblend:0.2", {"ratio": 0.5}, "cacheblend:0.5"),
        ("cacheclip:0.2,4", {"ratio": 0.5}, "cacheclip:0.5,4"),  # what stands behind it stays
    ],
)
async def test_the_servers_policy_is_the_default_and_may_get_another_ratio(
    default: str, given: Any, policy: str
) -> None:
    work = await asked(chat(kvcache=given), policy=default)
    assert work.policy == policy_by_name(policy)


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


async def test_lengths_and_stops() -> None:
    work = await asked(chat(max_tokens=5, stop="."))
    assert (work.max_new_tokens, work.stop) == (5, (".",))
    work = await asked(chat(max_tokens=5, max_completion_tokens=6, stop=["a", "b"]))
    assert (work.max_new_tokens, work.stop) == (6, ("a", "b"))
    assert (await asked(chat(stop=None))).max_new_tokens == 128
    work = await asked({"model": "tiny", "prompt": "The"}, COMPLETIONS)
    assert (work.max_new_tokens, work.stop) == (16, ())
    few = RequestLimits(max_answer_tokens=9)
    for body, path in ((chat(), CHAT), ({"model": "tiny", "prompt": "The"}, COMPLETIONS)):
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
    }
    assert (await asked(chat(**given))).question
    assert (await asked(chat(**dict.fromkeys([*given, "audio", "seed", "top_k"])))).question


# ---------------------------------------------------------------------- what is answered
async def test_an_answer_is_openais_object_with_its_costs() -> None:
    app, backend = scripted()
    async with client(app) as http:
        reply = await http.post(CHAT, json=chat())
    body = reply.json()
    costs = body.pop("kvcache")
    assert abs(body.pop("created") - time.time()) < 60
    assert body == {
        "id": backend.works[0].id,
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "yes", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 0,
            "completion_tokens": 3,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert (costs["queue_wait"], costs["batch"], costs["replica"]) == (0.25, 2, "r1")
    assert costs["policy"] == "Reuse()"
    assert re.fullmatch(r"req_[0-9a-f]{32}", reply.headers["x-request-id"])


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_stream_is_openais_chunks(wanted: bool) -> None:
    app, _ = scripted()
    options = {"stream_options": {"include_usage": True}} if wanted else {}
    async with client(app) as http:
        reply = await http.post(CHAT, json=chat(stream=True, **options))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = data_of(reply.text)
    assert done == "[DONE]"
    assert {one["object"] for one in chunks} == {"chat.completion.chunk"}
    assert len({(one["id"], one["created"], one["model"]) for one in chunks}) == 1
    usages = [one.pop("usage", "none") for one in chunks]
    if wanted:
        assert usages[:-1] == [None] * 4
        assert usages[-1]["completion_tokens"] == 3
        usage = chunks.pop()
        assert usage["choices"] == []
    else:
        assert set(usages) == {"none"}
        usage = {}
    choices = [one["choices"][0] for one in chunks]
    deltas = [one["delta"] for one in choices]
    first = {"role": "assistant", "content": ""}
    assert deltas == [first, {"content": "y"}, {"content": "es"}, {}]
    assert [one["finish_reason"] for one in choices] == [None, None, None, "stop"]
    # The usage stands alone behind it, as OpenAI's clients know it.
    assert [one.get("kvcache", {}).get("queue_wait") for one in chunks] == [None] * 3 + [0.25]
    assert "kvcache" not in usage


async def test_completions_have_objects_of_their_own() -> None:
    app, _ = scripted()
    body = {"model": "tiny", "prompt": "The"}
    async with client(app) as http:
        whole = (await http.post(COMPLETIONS, json=body)).json()
        streamed = await http.post(COMPLETIONS, json={**body, "stream": True})
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


async def test_a_backend_that_cannot_say_is_not_ready(caplog: Any) -> None:
    app, backend = scripted()

    async def fails() -> bool:
        raise OSError("gone")

    backend.ready = fails  # type: ignore[method-assign]  # a fault is made
    async with client(app) as http:
        assert (await http.get("/ready")).status_code == 503
    assert "gone" in caplog.text


async def test_the_schema_says_what_the_server_does() -> None:
    app, _ = scripted()
    async with client(app) as http:
        schema = (await http.get("/openapi.json")).json()
    post = schema["paths"][CHAT]["post"]
    assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= set(post["responses"])
    assert set(post["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    for path in schema["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
    names = schema["components"]["schemas"]
    assert "HTTPValidationError" not in names
    assert names["ChatRequest"]["additionalProperties"] is False
    assert names["ChatRequest"]["examples"]


async def test_the_schema_says_whether_keys_are_wanted(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = new_key(file, "acme")
    for changes, wanted in (({}, False), ({"api_keys": file}, True)):
        app, _ = scripted(**changes)
        async with client(app) as http:
            schema = (await http.get("/openapi.json")).json()
            reply = await http.post(CHAT, json=chat(), headers={"authorization": f"Bearer {key}"})
        assert reply.status_code == 200
        assert bool(schema["paths"][CHAT]["post"].get("security")) is wanted
