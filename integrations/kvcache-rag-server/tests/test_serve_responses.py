"""OpenAI's responses: the same answers as a chat's, as its newer clients read them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from serve_fakes import DEADLINE, running, scripted, settings, tiny_backend
from serve_process import posted

from kvcache_rag.generation.tools import Reasoning, ToolCall
from kvcache_rag_server.app import build_app
from kvcache_rag_server.backend import BackendRequest, Event, Finished, Piece, Started

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

RESPONSES = "/v1/responses"
QUESTION = "Where does Bralo keep the red lamp?"
DOCUMENTS = ["Bralo keeps the red lamp in the hall.", "The blue cup belongs to Mira."]
FIND: Any = {
    "type": "function",
    "name": "find",
    "parameters": {
        "type": "object",
        "properties": {"thing": {"type": "string", "maxLength": 8}},
        "required": ["thing"],
    },
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_backend() as backend, running(build_app(backend, settings())) as found:
        yield f"{found}/v1"


@pytest.fixture
def sync(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE) as found:
        yield found


@pytest.mark.parametrize("extra", [{}, {"documents": DOCUMENTS}], ids=["a chat", "over documents"])
def test_a_response_is_a_chats_answer(sync: openai.OpenAI, extra: dict[str, Any]) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    expected = sync.chat.completions.create(
        model="tiny", messages=messages, max_tokens=16, extra_body=extra
    )
    asked: Any = {"model": "tiny", "input": QUESTION, "max_output_tokens": 16}
    whole = sync.responses.create(**asked, extra_body=extra)
    text = expected.choices[0].message.content
    assert whole.output_text == text
    assert whole.usage is not None
    assert expected.usage is not None
    assert whole.usage.total_tokens == expected.usage.total_tokens
    cut = expected.choices[0].finish_reason == "length"
    assert whole.status == ("incomplete" if cut else "completed")
    with sync.responses.stream(**asked, extra_body=extra) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"


def test_an_agents_loop_over_responses(sync: openai.OpenAI) -> None:
    given: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": "tiny", "tools": [FIND], "max_output_tokens": 64}
    choice: Any = {"type": "function", "name": "find"}
    first = sync.responses.create(input=given, tool_choice=choice, **asked)
    calls = [item for item in first.output if item.type == "function_call"]
    assert {one.name for one in calls} == {"find"}
    assert first.status == "completed"
    with sync.responses.stream(input=given, tool_choice=choice, **asked) as stream:
        streamed = stream.get_final_response()
    named = [(one.name, one.arguments) for one in streamed.output if one.type == "function_call"]
    assert named == [(one.name, one.arguments) for one in calls]
    given += [item.to_dict() for item in first.output]
    answered = {"type": "function_call_output", "output": "in the hall"}
    given += [{**answered, "call_id": one.call_id} for one in calls]
    last = sync.responses.create(input=given, tool_choice="none", **asked)
    assert last.output_text


def test_a_response_is_held_to_a_schema(sync: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"found": {"type": "boolean"}},
        "required": ["found"],
    }
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": schema}}
    asked: Any = {"model": "tiny", "input": QUESTION, "max_output_tokens": 32, "text": form}
    assert isinstance(json.loads(sync.responses.create(**asked).output_text)["found"], bool)


async def speaks(work: BackendRequest) -> AsyncGenerator[Event, None]:
    """Thoughts, a text and a call."""
    from serve_fakes import answer

    parts = (Reasoning("Hm."), "I ", "look.", ToolCall("find", {"thing": "lamp"}, "call00001"))
    yield Started(0.0)
    if work.streaming:
        for part in parts:
            yield Piece(part) if isinstance(part, str) else Piece(part=part)
    yield Finished(answer("…"), (parts[0], "I look.", parts[3]))


def test_thoughts_texts_and_calls_are_items_of_their_own() -> None:
    app, backend = scripted(speaks)
    with (
        running(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: Any = {"model": "tiny", "input": QUESTION, "instructions": "Be brief."}
        whole = client.responses.create(**asked, tools=[FIND])
        with client.responses.stream(**asked, tools=[FIND]) as stream:
            events = [*stream]
            streamed = stream.get_final_response()
    for found in (whole, streamed):
        assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
        assert found.output_text == "I look."
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(numbers)
    assert backend.works[0].turns[0]["content"] == "Be brief."


async def test_what_an_answer_said_and_called_is_one_turn() -> None:
    call = {"type": "function_call", "name": "find", "arguments": "{}"}
    result = {"type": "function_call_output", "output": "lamp"}
    given = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        *({**call, "call_id": number} for number in "12"),
        *({**result, "call_id": number} for number in "12"),
        {"role": "user", "content": "And?"},
    ]
    reply, backend = await posted({"model": "tiny", "input": given}, RESPONSES)
    assert reply.status_code == 200, reply.text
    roles = [turn["role"] for turn in backend.works[0].turns]
    assert roles == ["user", "assistant", "tool", "tool", "user"]
    assert len(backend.works[0].turns[1]["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is kept"),
        ({"conversation": "c"}, "conversation", "nothing is kept"),
        ({"background": True}, "background", "leave background out"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "tools of the type function only"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "store: false"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "must be text, json_object"),
        ({"inptu": "a"}, "inptu", "did you mean input?"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "has no message"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a", "Unicode"),
        (
            {"tools": [{**FIND, "parameters": {"a": "\ud800"}}], "tool_choice": "none"},
            "tools[0].parameters",
            "JSON",
        ),
    ],
)
async def test_what_responses_cannot_do_is_named(changes: Any, param: str, says: str) -> None:
    reply, backend = await posted({"model": "tiny", "input": "Who?", **changes}, RESPONSES)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"].startswith(param)
    assert says in error["message"]
    assert not backend.works
