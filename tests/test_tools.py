"""Calls of tools and thoughts, read out of answers as they are written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from scripted import RESPONSE

from kvcache_rag import InvalidInputError
from kvcache_rag.generation.grammar import json_grammar
from kvcache_rag.generation.tools import (
    JsonReader,
    Reasoning,
    TemplateReader,
    ThoughtReader,
    ToolCall,
    ToolChoice,
    UnreadableCall,
    json_turns,
    read_whole,
)
from kvcache_rag.models.responses import stream_parser

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.generation.tools import AnswerPart, AnswerReader

SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "most": {"type": "integer"}},
            "required": ["query"],
        },
    },
}
CALL = '{"name": "search", "arguments": {"query": "a } \\" b", "most": 2}}'


def by_template(prompt: str = "<assistant>") -> TemplateReader:
    return TemplateReader(stream_parser(RESPONSE, prompt, [SEARCH]))


def plain(parts: list[AnswerPart]) -> list[Any]:
    """Parts without made-up ids, neighbouring texts joined."""
    found: list[Any] = []
    for part in parts:
        if isinstance(part, ToolCall):
            found.append((part.name, part.arguments))
        elif isinstance(part, UnreadableCall):
            found.append((part.text, ...))
        elif found and type(found[-1]) is type(part):
            last = found.pop()
            found.append(last + part if isinstance(part, str) else Reasoning(last.text + part.text))
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(
    ("make", "text", "parts"),
    [
        (ThoughtReader, "Hello <think>.", ["Hello <think>."]),
        (ThoughtReader, " <", [" <"]),
        (ThoughtReader, "<think>\nhm  m\n</think>\n\nYes. ", [Reasoning("hm  m"), "Yes. "]),
        (ThoughtReader, "<think>\n\n</think>\n\nYes.", ["Yes."]),
        (ThoughtReader, "<think>cut </thi", [Reasoning("cut </thi")]),
        (lambda: ThoughtReader(True), "hm\n</think>Yes.", [Reasoning("hm"), "Yes."]),
        (JsonReader, '{"answer": "A \\"b\\"\\n\\u00e4 \\ud83d\\ude00 ü"}', ['A "b"\nä 😀 ü']),
        (JsonReader, '{"answer": "cut \\u00', ["cut "]),
        (JsonReader, r'{"answer": "C:\\ud8ab and \\\ud83d\ude00\\"}', ["C:\\ud8ab and \\😀\\"]),
        (
            JsonReader,
            f'{{"tool_calls": [{CALL}, {CALL}]}}',
            [("search", {"query": 'a } " b', "most": 2})] * 2,
        ),
        (JsonReader, '{"tool_calls": [{"name": "sea', [('{"name": "sea', ...)]),
        (JsonReader, "", []),
        (by_template, "Yes.\n</s>", ["Yes."]),
        (
            by_template,
            f"<think>\nhm m\n</think>\nSee: <tool_call>{CALL}</tool_call>\n"
            '<tool_call>{"name": "search", "arguments": {"most": "7"}}</tool_call></s>',
            [
                Reasoning("hm m"),
                "See:",
                ("search", {"query": 'a } " b', "most": 2}),
                ("search", {"most": 7}),
            ],
        ),
        (lambda: by_template("<assistant><think>\n"), "hm</think>Yes.", [Reasoning("hm"), "Yes."]),
        (by_template, '<tool_call>{"name": 3}</tool_call></s>', [('{"name": 3}', ...)]),
    ],
)
def test_an_answer_is_read_alike_however_it_is_cut(
    make: Callable[[], AnswerReader], text: str, parts: list[Any]
) -> None:
    assert plain(read_whole(make(), text)) == parts
    for size in (1, 2, 3, 7):
        reader, found = make(), list[Any]()
        for start in range(0, len(text), size):
            found += reader.feed(text[start : start + size])
        assert plain([*found, *reader.finish()]) == parts


def test_a_call_that_is_no_json_is_told_and_nothing_of_it_is_lost() -> None:
    text = "<tool_call>{search}</tool_call> so"
    found = read_whole(by_template(), text)
    assert isinstance(found[0], UnreadableCall)
    assert "{search}" in found[0].text
    assert "\n" not in found[0].error


def test_what_may_be_called_is_the_schema_of_an_answer() -> None:
    def accepts(choice: ToolChoice, answer: Any) -> bool:
        import jsonschema

        json_grammar(choice.schema())
        return jsonschema.Draft202012Validator(choice.schema()).is_valid(answer)

    other = {"type": "function", "function": {"name": "stop", "parameters": {}}}
    call = {"name": "search", "arguments": {"query": "x"}}
    free = ToolChoice.of([SEARCH, other], None, None)
    assert accepts(free, {"answer": "x"})
    assert accepts(free, {"tool_calls": [call, {"name": "stop", "arguments": {}}]})
    assert not accepts(free, {"tool_calls": []})
    assert not accepts(free, {"tool_calls": [{**call, "arguments": {"most": 2}}]})
    assert not accepts(ToolChoice.of([SEARCH], "any", None), {"answer": "x"})
    assert not accepts(ToolChoice.of([SEARCH], "auto", False), {"tool_calls": [call, call]})
    named = ToolChoice.of([SEARCH, other], {"function": {"name": "search"}}, None)
    assert not accepts(named, {"tool_calls": [{"name": "stop", "arguments": {}}]})


@pytest.mark.parametrize(
    ("choice", "parallel", "most"),
    [("required", None, 8), ("auto", None, 8), ("required", False, 1), ("search", None, 1)],
)
def test_a_tool_that_is_named_is_called_once(choice: str, parallel: Any, most: int) -> None:
    schema = ToolChoice.of([SEARCH], choice, parallel).schema()
    calls = next(one for one in schema.get("anyOf", [schema]) if "tool_calls" in one["properties"])
    assert calls["properties"]["tool_calls"]["maxItems"] == most


def test_definitions_of_several_tools_do_not_meet() -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        parameters = {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/X"}},
            "$defs": {"X": {"type": kind}},
            "required": ["x"],
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    schema = ToolChoice.of([tool("a", "string"), tool("b", "integer")], "any", False).schema()
    assert json_grammar(schema)
    assert schema["$defs"] == {"tool0_X": {"type": "string"}, "tool1_X": {"type": "integer"}}
    assert '"#/$defs/tool1_X"' in json.dumps(schema)


@pytest.mark.parametrize("named", ["definitions", "$defs"])
@pytest.mark.parametrize("among", ["properties", "patternProperties"])
def test_a_parameter_that_is_called_as_definitions_are_stays_one(named: str, among: str) -> None:
    parameters = {"type": "object", among: {named: {"type": "string"}}, "required": [named]}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    text = json.dumps(ToolChoice.of([tool], "any", None).schema())
    assert f'"{among}": {{"{named}": {{"type": "string"}}}}' in text


@pytest.mark.parametrize("name", ["auto", "required"])
def test_a_tool_with_the_name_of_a_choice_hides_no_other(name: str) -> None:
    odd = {"type": "function", "function": {**SEARCH["function"], "name": name}}
    assert len(ToolChoice.of([SEARCH, odd], name, None).callable_tools) == 2


@pytest.mark.parametrize("choice", ["serch", 7, {"name": "x"}, "", ["search"]])
def test_a_choice_of_no_tool_is_refused(choice: Any) -> None:
    with pytest.raises(InvalidInputError, match="tool_choice must be"):
        ToolChoice.of([SEARCH], choice, None)
    with pytest.raises(InvalidInputError, match="there are no tools"):
        ToolChoice.of([], "any", None)


def test_turns_of_tools_are_written_in_json_where_answers_are() -> None:
    call = {"id": "1", "function": {"name": "search", "arguments": {"query": "x"}}}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "found", "tool_call_id": "1"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "It is."},
    ]
    assert json_turns(turns, "Tools.") == [
        {"role": "user", "content": "Tools.\n\nLook."},
        {
            "role": "assistant",
            "content": '{"tool_calls": [{"name": "search", "arguments": {"query": "x"}}]}',
        },
        {"role": "user", "content": "Result of search: found\n\nSo?"},
        {"role": "assistant", "content": '{"answer": "It is."}'},
    ]
    assert json_turns(turns, "")[-1]["content"] == "It is."
