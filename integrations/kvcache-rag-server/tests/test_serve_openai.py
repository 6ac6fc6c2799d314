"""What the engine can do, the server does: tools, JSON, log probabilities, several answers, logits.

Each is asked by OpenAI's own client, and said to be what the engine does.
"""

from __future__ import annotations

import asyncio
import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch
from pydantic import BaseModel
from scripted import NATIVE, RESPONSE
from scripted import scripted as scripted_model
from serve_fakes import DEADLINE, chat, client, running, settings, tiny_backend
from serve_process import CHAT

from kvcache_rag import Engine, FullRecompute, MemoryStore
from kvcache_rag.prompt.conversation import said
from kvcache_rag_server.app import build_app
from kvcache_rag_server.local import LocalBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "Where does Bralo keep the red lamp?"
USER: Any = [{"role": "user", "content": QUESTION}]
DOCUMENTS = ["Bralo keeps the red lamp in the hall.", "The blue cup belongs to Mira."]
FIND: Any = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds a thing.",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"type": "string", "maxLength": 8}},
            "required": ["thing"],
        },
    },
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PLACE: Any = {
    "type": "object",
    "properties": {"place": {"enum": ["hall", "cellar"]}, "found": {"type": "boolean"}},
    "required": ["place", "found"],
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_backend() as backend, running(build_app(backend, settings())) as found:
        yield f"{found}/v1"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("tiny", device="cpu")


@pytest.fixture
def sync(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE) as found:
        yield found


def create(sync: openai.OpenAI, **fields: Any) -> Any:
    return sync.chat.completions.create(**{"model": "tiny", "messages": USER, **fields})


def over_documents(**fields: Any) -> dict[str, Any]:
    return {**fields, "extra_body": {"documents": DOCUMENTS}}


# ---------------------------------------------------------------------- tools
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
@pytest.mark.parametrize("where", [dict, over_documents], ids=["a chat", "over documents"])
def test_a_call_that_has_to_be_made_fits_its_tool(sync: Any, where: Any, choice: Any) -> None:
    asked = where(tools=[ADD, FIND], tool_choice=choice, max_tokens=64)
    if choice == "required":  # one that is named is called once by itself
        asked["parallel_tool_calls"] = False
    (made,) = create(sync, **asked).choices
    (call,) = made.message.tool_calls
    assert made.finish_reason == "tool_calls"
    assert made.message.content is None
    arguments = json.loads(call.function.arguments)
    if choice == "required":
        assert call.function.name in ("find", "add")
    else:
        assert call.function.name == "find"
        assert isinstance(arguments["thing"], str)
    with sync.chat.completions.stream(model="tiny", messages=USER, **asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    (other,) = streamed.message.tool_calls
    assert (other.function.name, json.loads(other.function.arguments)) == (
        call.function.name,
        arguments,
    )
    assert streamed.finish_reason == "tool_calls"


def told(script: Any, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any], list[str]]:
    """What a model that writes calls in its own form says, whole and streamed; and was told."""
    seen: list[str] = []

    def noted(prompt: str) -> str:
        seen.append(prompt)
        return str(script)

    model = scripted_model(noted, NATIVE, RESPONSE)
    engine = Engine(*model, store=MemoryStore(), policy=FullRecompute(), context_window=4096)

    async def ask() -> tuple[dict[str, Any], list[Any]]:
        backend = LocalBackend(engine, name="tiny")
        try:
            async with client(build_app(backend, settings())) as http:
                whole = await http.post(CHAT, json=body)
                streamed = await http.post(CHAT, json={**body, "stream": True})
        finally:
            await backend.close()
        assert whole.status_code == streamed.status_code == 200, whole.text
        lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        return whole.json(), [json.loads(line)["choices"][0] for line in lines]

    return *asyncio.run(ask()), seen


TWICE = (
    "<think>Both.</think>I look."
    '<tool_call>{"name": "find", "arguments": {"thing": "lamp"}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["a chat", "over documents"])
def test_calls_in_the_models_own_form_are_openais(documents: Any) -> None:
    body = chat(tools=[FIND, ADD], documents=documents, max_tokens=200)
    whole, chunks, seen = told(TWICE, body)
    (choice,) = whole["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Both.")
    calls = [
        (one["type"], one["function"]["name"], json.loads(one["function"]["arguments"]))
        for one in message["tool_calls"]
    ]
    assert calls == [("function", "find", {"thing": "lamp"}), ("function", "add", {"a": 1})]
    assert any('"name": "find"' in one for one in seen), "the model is told of its tools"

    assert chunks[-1]["finish_reason"] == "tool_calls"
    deltas = [one["delta"] for one in chunks]
    assert "".join(one.get("content") or "" for one in deltas) == "I look."
    assert "".join(one.get("reasoning_content", "") for one in deltas) == "Both."
    gathered: dict[int, dict[str, str]] = {}
    for delta in deltas:
        for part in delta.get("tool_calls", ()):
            known = gathered.setdefault(part["index"], {"name": "", "arguments": "", "id": ""})
            known["id"] += part.get("id", "")
            for name, text in part["function"].items():
                known[name] += text
    assert [(one["name"], json.loads(one["arguments"])) for one in gathered.values()] == [
        (name, arguments) for _, name, arguments in calls
    ]
    assert [*gathered] == [0, 1]
    assert len({one["id"] for one in gathered.values()}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_is_no_text(sync: openai.OpenAI, stream: bool) -> None:
    asked = {"tools": [FIND], "tool_choice": "required", "max_tokens": 12}
    if stream:
        chunks = [one.choices[0] for one in create(sync, **asked, stream=True)]
        content = "".join(one.delta.content or "" for one in chunks)
        calls = [one.delta.tool_calls for one in chunks if one.delta.tool_calls]
        reason = chunks[-1].finish_reason
    else:
        (choice,) = create(sync, **asked).choices
        content, calls = choice.message.content or "", choice.message.tool_calls or []
        reason = choice.finish_reason
    assert (content, calls, reason) == ("", [], "length")


def test_a_tools_schema_is_a_hint_unless_it_is_strict(sync: openai.OpenAI) -> None:
    listed = {"type": "array", "items": {"type": "string", "maxLength": 4}, "uniqueItems": True}
    parameters = {"type": "object", "properties": {"names": {**listed, "maxItems": 2}}}
    tool: Any = {"type": "function", "function": {"name": "name", "parameters": parameters}}
    asked = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 64}
    (choice,) = create(sync, tools=[tool], **asked).choices
    assert choice.message.tool_calls[0].function.name == "name"
    tool["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        create(sync, tools=[tool], **asked)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own model
def test_a_parsed_answer_can_be_given_back(sync: openai.OpenAI) -> None:
    class Place(BaseModel):
        found: bool

    parsed = sync.chat.completions.parse(
        model="tiny", messages=USER, response_format=Place, max_tokens=32
    )
    message = parsed.choices[0].message
    assert isinstance(message.parsed, Place)
    more: Any = [*USER, message, {"role": "user", "content": "Why?"}]
    assert create(sync, messages=more, max_tokens=2).choices


def test_what_should_be_a_call_and_cannot_be_read_is_text() -> None:
    whole, chunks, _ = told("<tool_call>{nonsense</tool_call>", chat(tools=[FIND], max_tokens=99))
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)
    assert "nonsense" in choice["message"]["content"]
    assert "nonsense" in "".join(one["delta"].get("content", "") for one in chunks)


def test_tools_that_may_not_be_called_are_no_form_of_the_answer() -> None:
    whole, _, seen = told("Hall.", chat(tools=[FIND], tool_choice="none", max_tokens=99))
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hall.",
        "refusal": None,
    }
    assert not any('"find"' in one for one in seen)


CALLED = [
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "lamp"},
    {"role": "user", "content": "And?"},
]


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, []),
        ({"tools": [FIND, ADD], "tool_choice": "none"}, []),
        ({"tools": [FIND, ADD], "parallel_tool_calls": False}, ["find"]),
        ({"tools": [FIND, ADD]}, ["find", "add"]),
    ],
    ids=["no tools", "none", "one", "several"],
)
def test_no_call_is_told_that_was_not_allowed(fields: dict[str, Any], calls: list[str]) -> None:
    """A model that has seen calls makes some, whatever it is told."""
    whole, chunks, _ = told(TWICE, {**chat(max_tokens=200, **fields), "messages": CALLED})
    (choice,) = whole["choices"]
    made = [one["function"]["name"] for one in choice["message"].get("tool_calls", [])]
    streamed = [
        part["function"]["name"]
        for one in chunks
        for part in one["delta"].get("tool_calls", ())
        if "name" in part["function"]
    ]
    assert made == streamed == calls
    reason = "tool_calls" if calls else "stop"
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == reason


def test_an_answer_that_is_cut_in_its_second_call_says_so() -> None:
    whole, chunks, _ = told(TWICE, chat(tools=[FIND, ADD], max_tokens=110))
    (choice,) = whole["choices"]
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["find"]
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "length"


def test_tokens_of_a_stop_string_are_not_told(sync: openai.OpenAI) -> None:
    plain = create(sync, max_tokens=8).choices[0].message.content
    stop = plain[len(plain) // 2 :]
    (choice,) = create(sync, max_tokens=8, stop=stop, logprobs=True).choices
    text = "".join(one.token for one in choice.logprobs.content)
    assert choice.message.content.strip() in text
    assert len(text) < len(plain)


@pytest.mark.parametrize("number", [1e-38, 0.0, 11.0])
def test_a_penalty_that_leaves_no_numbers_is_refused(sync: openai.OpenAI, number: float) -> None:
    with pytest.raises(openai.BadRequestError, match="repetition_penalty"):
        create(sync, extra_body={"repetition_penalty": number})


def test_any_schema_is_told_to_the_model(sync: openai.OpenAI) -> None:
    def tokens(schema: Any) -> int:
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        asked = over_documents(response_format=form, max_tokens=2)
        return int(create(sync, **asked).usage.prompt_tokens)

    listed = {"type": "array", "items": {"enum": ["hall", "cellar"]}, "maxItems": 2}
    assert tokens(listed) > tokens({"type": "object"})


def test_an_agents_loop_runs_to_its_end(sync: openai.OpenAI) -> None:
    """OpenAI's example: a call, its result, and an answer that has been given both."""
    messages = [*USER]
    first = create(sync, messages=messages, tools=[FIND], tool_choice="required", max_tokens=64)
    message = first.choices[0].message
    messages.append(message.to_dict())
    answered = {"role": "tool", "content": "in the hall"}
    messages += [{**answered, "tool_call_id": call.id} for call in message.tool_calls]
    last = create(sync, messages=messages, tools=[FIND], tool_choice="none", max_tokens=16)
    assert last.choices[0].finish_reason in ("stop", "length")
    assert last.usage.prompt_tokens > first.usage.prompt_tokens - 200


# ---------------------------------------------------------------------- JSON
@pytest.mark.parametrize("where", [dict, over_documents], ids=["a chat", "over documents"])
def test_an_answer_is_held_to_a_schema(sync: openai.OpenAI, where: Any) -> None:
    schema = {"name": "place", "schema": PLACE, "strict": True}
    asked = where(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=64)
    found = json.loads(create(sync, **asked).choices[0].message.content)
    assert found["place"] in ("hall", "cellar")
    assert isinstance(found["found"], bool)
    pieces = create(sync, **asked, stream=True)
    text = "".join(one.choices[0].delta.content or "" for one in pieces)
    assert json.loads(text) == found


def test_an_answer_is_any_object(sync: openai.OpenAI, engine: Engine) -> None:
    asked = {"response_format": {"type": "json_object"}, "max_tokens": 6}
    text = create(sync, **asked).choices[0].message.content
    assert text.startswith("{")
    plain = create(sync, max_tokens=6).choices[0].message.content
    prompt = engine.render_chat(USER)
    assert plain == engine.complete(prompt, max_new_tokens=6).text


# ---------------------------------------------------------------------- log probabilities
def likelihoods(engine: Engine, prompt: str, answer: tuple[int, ...]) -> Any:
    """Log probabilities at each place of an answer, `(tokens, vocabulary)`, by one plain pass."""
    ids = [*engine.tokenize_text(prompt), *answer]
    with torch.no_grad():
        logits = engine.model(torch.tensor([ids])).logits[0]
    return logits[len(ids) - len(answer) - 1 : -1].float().log_softmax(-1)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_log_probabilities_are_the_models(
    sync: openai.OpenAI, engine: Engine, fields: dict[str, Any]
) -> None:
    asked = {"logprobs": True, "top_logprobs": 3, "max_tokens": 8, **fields}
    (choice,) = create(sync, **asked).choices
    told = choice.logprobs.content
    assert "".join(one.token for one in told).strip() == choice.message.content.strip()
    text = choice.message.content
    ids = list(engine.tokenizer(text, add_special_tokens=False)["input_ids"])
    rows = likelihoods(engine, engine.render_chat(USER), tuple(ids))
    # One token at a time is rounded otherwise than all at once: by a step of bfloat16.
    near = partial(pytest.approx, abs=1e-3, rel=2.0**-7)
    for token, row, place in zip(ids, rows, told, strict=False):
        assert place.logprob == near(float(row[token]))
        best = [one.logprob for one in place.top_logprobs]
        assert best == near(row.topk(3).values.tolist())
        assert bytes(place.bytes).decode() == place.token
    assert len(told) >= len(ids) > 0
    pieces = [*create(sync, **asked, stream=True)]
    streamed = [
        place
        for one in pieces
        if one.choices[0].logprobs is not None
        for place in one.choices[0].logprobs.content
    ]
    assert [one.token for one in streamed] == [one.token for one in told]


def test_completions_have_log_probabilities_in_their_own_form(sync: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "The red lamp", "max_tokens": 5, "logprobs": 2}
    (choice,) = sync.completions.create(**asked).choices
    told = choice.logprobs
    assert told is not None
    assert "".join(told.tokens or ()).strip() == choice.text.strip()
    assert told.text_offset is not None
    assert told.tokens is not None
    assert told.text_offset[1] == len(told.tokens[0])
    assert all(len(one) <= 2 for one in told.top_logprobs or ())
    offsets = [
        at
        for one in sync.completions.create(**asked, stream=True)
        if one.choices[0].logprobs is not None
        for at in one.choices[0].logprobs.text_offset or ()
    ]
    assert offsets == told.text_offset


# ---------------------------------------------------------------------- several answers
def test_several_answers_are_each_an_answer(sync: openai.OpenAI, engine: Engine) -> None:
    one = create(sync, **over_documents(max_tokens=8))
    three = create(sync, **over_documents(max_tokens=8, n=3))
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert {choice.message.content for choice in three.choices} == {one.choices[0].message.content}
    assert three.usage.completion_tokens == 3 * one.usage.completion_tokens
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    sampled = {"temperature": 2.0, "seed": 5, "n": 4, "max_tokens": 8}
    texts = [choice.message.content for choice in create(sync, **sampled).choices]
    assert len({*texts}) > 1, "each is drawn anew"
    assert texts == [choice.message.content for choice in create(sync, **sampled).choices]
    gathered: dict[int, str] = {}
    for chunk in create(sync, **sampled, stream=True):
        for choice in chunk.choices:
            text = gathered.get(choice.index, "")
            gathered[choice.index] = text + (choice.delta.content or "")
    assert [gathered[index] for index in range(4)] == texts


# ---------------------------------------------------------------------- logits
def penalised(
    engine: Engine, frequency: float, presence: float, bias: dict[int, float], count: int
) -> list[int]:
    """Greedy tokens by OpenAI's formula, one plain pass of everything a token."""
    ids = list(engine.tokenize_text(engine.render_chat(USER)))
    said: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            logits = engine.model(torch.tensor([ids + said])).logits[0, -1].float().clone()
        for token in {*said}:
            logits[token] -= frequency * said.count(token) + presence
        for token, value in bias.items():
            logits[token] += value
        said.append(int(logits.argmax()))
        if said[-1] == engine.tokenizer.eos_token_id:
            break
    return said


@pytest.mark.parametrize(
    ("frequency", "presence", "shift"),
    [(0.0, 2.0, None), (2.0, 0.0, None), (-1.5, -2.0, None), (0.0, 0.0, 4.0), (1.0, 1.0, -100.0)],
)
def test_penalties_and_biases_are_openais_formula(
    sync: openai.OpenAI, engine: Engine, frequency: float, presence: float, shift: float | None
) -> None:
    plain = penalised(engine, 0.0, 0.0, {}, 8)
    bias = {} if shift is None else {plain[0]: shift, plain[-1]: -shift / 2}
    expected = penalised(engine, frequency, presence, bias, 8)
    got = create(
        sync,
        max_tokens=8,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias={str(token): value for token, value in bias.items()},
    )
    text = engine.tokenizer.decode(expected, skip_special_tokens=True)
    assert got.choices[0].message.content == text


def test_repetitions_are_avoided_and_unlikely_tokens_left_out(
    sync: openai.OpenAI, engine: Engine
) -> None:
    def said(**fields: Any) -> str:
        asked: Any = {"model": "tiny", "prompt": "The red lamp", "max_tokens": 12, **fields}
        return str(sync.completions.create(**asked).choices[0].text)

    expected = engine.complete("The red lamp", max_new_tokens=12, repetition_penalty=1.9).text
    assert said(extra_body={"repetition_penalty": 1.9}) == expected != said()
    sampled = said(temperature=2.0, seed=7, extra_body={"min_p": 1.0})
    assert sampled == said(), "the likeliest alone is left"


def test_a_bias_of_no_token_is_refused(sync: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="logit_bias names the token 999999999"):
        create(sync, max_tokens=8, logit_bias={"999999999": 1})
    assert math.isfinite(create(sync, max_tokens=1).usage.total_tokens)


def test_a_foreign_instruction_and_tools_stand_behind_the_documents() -> None:
    body = chat(tools=[FIND], documents=DOCUMENTS, max_tokens=20)
    body["messages"].insert(0, said("system", "Be brief."))
    _, _, seen = told("Hall.", body)
    assert any("Be brief." in one and '"find"' in one for one in seen)
