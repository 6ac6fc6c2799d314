"""Tool calls: how a model is told about tools, and how its answer is read as it is written.

A model whose chat template and response template know tools is asked in its own form.  A grammar
holds any other to JSON: `{"answer": "..."}` or `{"tool_calls": [{"name": ..., "arguments": ...}]}`.
That does not ensure that a call makes sense.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.prompt.conversation import joined, said

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcache_rag.models.responses import StreamParser

ToolForm: TypeAlias = Literal["native", "json", ""]
"""How calls are written: as the model learned it, as JSON held by a grammar, or not at all."""

MOST_CALLS: Final = 8
"""Most calls in one answer in JSON; without a limit a small model may go on to its last token."""

# Of a response template's fields; some on the hub say "thinking".
_REASONING: Final = ("reasoning_content", "thinking")
_STARTS: Final = ("<think>", "</think>")


@dataclass(frozen=True)
class ToolCall:
    """A tool call in an answer.

    Attributes:
        name: Name of the tool, as the model wrote it.
        arguments: Values by name.
        id: Generated here: nine letters and digits, which every chat template takes.
    """

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class UnreadableCall:
    """Text where a call should be, but is not one.

    Attributes:
        text: As the model wrote it.
        error: Why it cannot be read.
        id: Like that of a call.
    """

    text: str
    error: str
    id: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what a model thought before it answered."""

    text: str


AnswerPart: TypeAlias = "str | Reasoning | ToolCall | UnreadableCall"
"""A part of an answer; texts and thoughts come in pieces."""


@dataclass(frozen=True)
class ToolChoice:
    """Tools for one answer.

    Attributes:
        tools: Each `{"type": "function", "function": {"name", "description", "parameters"}}`.
        choice: "auto" leaves it to the model, "required" demands a call, "none" forbids calls; else
            the name of the one tool to call.
        parallel: Whether one answer may have several calls.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "auto"
    parallel: bool = True

    @classmethod
    def of(
        cls, tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: Any
    ) -> ToolChoice:
        """Make a choice from the values that frameworks use.

        Args:
            tools: As in the attributes.
            choice: As in the attributes; also "any" or True for "required", False for "none", None
                for "auto", or OpenAI's dict.
            parallel: None for yes.

        Raises:
            InvalidInputError: If `choice` is none of these, or no tool has that name.
        """
        names = [tool["function"]["name"] for tool in tools or ()]
        if isinstance(choice, Mapping):
            function = choice.get("function")
            choice = (function if isinstance(function, Mapping) else choice).get("name")
        if choice is None or isinstance(choice, (bool, str)):
            words = {"any": "required", True: "required", None: "auto", False: "none"}
            choice = words.get(choice, choice)
        if choice not in ("auto", "required", "none", *names):
            raise InvalidInputError(
                'tool_choice must be "auto", "none", "any" or the name of a tool '
                f"({', '.join(names) or 'there is none'}), not {choice!r}"
            )
        if choice in ("required",) and not names:
            raise InvalidInputError("tool_choice wants a call, and there are no tools; give tools")
        return cls(tuple(tools or ()), choice, parallel is not False)

    @property
    def may_call(self) -> bool:
        """Whether an answer can have calls."""
        return bool(self.tools) and self.choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether an answer has only calls."""
        return self.may_call and self.choice != "auto"

    @property
    def is_strict(self) -> bool:
        """Whether a tool wants all of its schema to be kept."""
        return any(tool["function"].get("strict") is True for tool in self.tools)

    @property
    def callable_tools(self) -> list[Mapping[str, Any]]:
        """The functions that may be called."""
        functions = [tool["function"] for tool in self.tools]
        if self.choice in ("auto", "required", "none"):  # as a tool may be called, too
            return functions
        return [one for one in functions if one["name"] == self.choice]

    def schema(self) -> dict[str, Any]:
        """The JSON schema of an answer."""
        definitions: dict[str, Any] = {}
        calls = []
        for index, function in enumerate(self.callable_tools):
            arguments = _moved(function.get("parameters") or {}, f"tool{index}_", definitions)
            if not {"type", "$ref", "anyOf", "oneOf", "allOf"} & {*arguments}:
                arguments = {"type": "object", **arguments}
            if arguments.get("type") == "object":
                arguments.setdefault("properties", {})
            calls.append(_object({"name": {"const": function["name"]}, "arguments": arguments}))
        is_one = not self.parallel or self.choice not in ("auto", "required")
        most = 1 if is_one else MOST_CALLS
        listed = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": most}
        forms = [_object({"tool_calls": listed})]
        if not self.must_call:
            forms.insert(0, _object({"answer": {"type": "string"}}))
        whole: dict[str, Any] = {"anyOf": forms} if len(forms) > 1 else forms[0]
        return {**whole, "$defs": definitions} if definitions else whole

    def instruction(self) -> str:
        """What the model is told about tools and JSON before the first question."""
        lines = [json.dumps(one, ensure_ascii=False) for one in self.callable_tools]
        call = '{"tool_calls": [{"name": "...", "arguments": {...}}]}'
        form = f"Call a tool by writing {call}."
        if not self.must_call:
            form = (
                f"If a tool helps, call it by writing {call}. "
                'Else answer by writing {"answer": "..."}.'
            )
        return "\n".join(["You have these tools:", *lines, f"{form} Write JSON only."])


def call_id() -> str:
    """An id for a call."""
    return uuid.uuid4().hex[:9]


def json_turns(turns: Sequence[Mapping[str, Any]], instruction: str) -> list[dict[str, Any]]:
    """A conversation with calls of tools as one without, in the JSON that the answer is held to.

    Args:
        turns: As chat templates read them.
        instruction: Put before what the user said first; "" for none, where answers are plain text.
    """
    names = {
        call.get("id"): call["function"]["name"]
        for turn in turns
        for call in turn.get("tool_calls") or ()
    }
    written: list[dict[str, Any]] = []
    for turn in turns:
        role, content = turn["role"], turn["content"]
        if role == "tool":
            name = turn.get("name") or names.get(turn.get("tool_call_id")) or "a tool"
            role, content = "user", f"Result of {name}: {content}"
        elif role == "assistant" and (turn.get("tool_calls") or instruction):
            content = _as_json(turn)
        written.append(said(role, content))
    written = joined(written)
    if instruction:
        first = next((i for i, turn in enumerate(written) if turn["role"] == "user"), None)
        if first is None:
            return [*written, said("user", instruction)]
        asked = written[first]["content"]
        written[first] = said("user", f"{instruction}\n\n{asked}")
    return written


def _as_json(turn: Mapping[str, Any]) -> str:
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in turn.get("tool_calls") or ()
    ]
    written = {"tool_calls": calls} if calls else {"answer": turn["content"]}
    return json.dumps(written, ensure_ascii=False)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


_NAMED: Final = ("properties", "patternProperties", "dependentSchemas")


def _moved(schema: Any, prefix: str, definitions: dict[str, Any]) -> Any:
    """A schema whose definitions stand among `definitions`, under names of their own.

    References count from the root, and a tool's parameters are no root any more.
    """
    if isinstance(schema, list):
        return [_moved(one, prefix, definitions) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("$defs", "definitions") and isinstance(value, Mapping):
            for name, one in value.items():
                definitions[prefix + name] = _moved(one, prefix, definitions)
        elif key in _NAMED and isinstance(value, Mapping):  # its keys are names, not words
            moved[key] = {name: _moved(one, prefix, definitions) for name, one in value.items()}
        elif key == "$ref" and isinstance(value, str):
            moved[key] = re.sub(r"^#/(?:\$defs|definitions)/", f"#/$defs/{prefix}", value)
        else:
            moved[key] = _moved(value, prefix, definitions)
    return moved


class AnswerReader(Protocol):
    """Splits an answer into parts while it is written."""

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that have become certain."""

    def finish(self) -> list[AnswerPart]:
        """The parts that are left when no more text comes."""


def read_whole(reader: AnswerReader, text: str) -> list[AnswerPart]:
    """The parts of a whole answer; neighbouring texts and thoughts are joined."""
    parts: list[AnswerPart] = []
    for part in (*reader.feed(text), *reader.finish()):
        last = parts[-1] if parts else None
        if isinstance(part, str) and isinstance(last, str):
            parts[-1] = last + part
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            parts[-1] = Reasoning(last.text + part.text)
        else:
            parts.append(part)
    return parts


class ThoughtReader:
    """Splits `<think>…</think>`, where an answer begins with it, from what is said.

    White space around the two is dropped.  Anywhere else these are words like others.
    """

    def __init__(self, begun: bool = False) -> None:
        """Read from the beginning; `begun` where the prompt ends with `<think>` already."""
        self._state = "thought" if begun else "start"
        self._held = ""
        self._trim = True

    def feed(self, text: str) -> list[AnswerPart]:
        self._held += text
        return self._read(at_end=False)

    def finish(self) -> list[AnswerPart]:
        return self._read(at_end=True)

    def _read(self, *, at_end: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(_STARTS[0]):
                self._state, self._held = "thought", begun[len(_STARTS[0]) :]
            elif at_end or not _STARTS[0].startswith(begun):
                self._state, self._trim = "text", False
        if self._state == "thought":
            thought, end, behind = self._held.partition(_STARTS[1])
            if end or at_end:
                self._give(parts, thought.rstrip(), Reasoning)
                self._state, self._held, self._trim = "text", behind, True
            else:
                # White space may be the last before the end, which may have begun.
                certain = thought[: len(thought) - _open_end(thought, _STARTS[1])].rstrip()
                self._held = self._held[len(certain) :]
                self._give(parts, certain, Reasoning)
        if self._state == "text":
            text, self._held = self._held, ""
            self._give(parts, text, str)
        return parts

    def _give(self, parts: list[AnswerPart], text: str, kind: Any) -> None:
        if self._trim:
            text = text.lstrip()
        if text:
            self._trim = False
            parts.append(kind(text))


# Characters of a string in JSON that are whole: of one that JSON writes as two, both halves.
_CERTAIN: Final = re.compile(
    r"""(?:
        [^"\\]
      | \\[^u]
      | \\u (?![dD][89abAB]) [0-9a-fA-F]{4}
      | \\u [dD][89abAB][0-9a-fA-F]{2} (?= [^\\] | \\[^u] | \\u[0-9a-fA-F]{4} )
    )*""",
    re.DOTALL | re.VERBOSE,
)


class JsonReader:
    """Reads answers in JSON (`ToolChoice.schema`): the text as it comes, each call when whole."""

    def __init__(self) -> None:
        """Read from the beginning."""
        self._text, self._at = "", 0
        self._key = ""
        self._calls = 0

    def feed(self, text: str) -> list[AnswerPart]:
        self._text += text
        if not self._key:
            begun = re.match(
                r'\s*\{\s*"(answer)"\s*:\s*"|\s*\{\s*"(tool_calls)"\s*:\s*\[', self._text
            )
            if begun is None:
                return []
            self._key, self._at = begun[1] or begun[2], begun.end()
        return self._answer() if self._key == "answer" else self._whole_calls()

    def finish(self) -> list[AnswerPart]:
        rest = self._text[self._at :]
        if self._key != "tool_calls" or not rest.strip(" \n,]}"):
            return []
        return [UnreadableCall(rest.strip(" ,"), "it is cut before its JSON ended", call_id())]

    def _answer(self) -> list[AnswerPart]:
        rest = self._text[self._at :]
        whole = _CERTAIN.match(rest)
        certain = whole[0] if whole else ""
        self._at += len(certain)
        said: str = json.loads(f'"{certain}"', strict=False)
        return [said] if said else []

    def _whole_calls(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while True:
            start = re.compile(r"[\s,]*(?=\{)").match(self._text, self._at)
            if start is None:
                return parts
            try:
                call, end = json.JSONDecoder(strict=False).raw_decode(self._text, start.end())
            except (ValueError, RecursionError):
                return parts  # not whole yet
            self._at = end
            self._calls += 1
            parts.append(checked_call(call, self._text[start.end() : end]))


class TemplateReader:
    """Reads answers by a response template."""

    def __init__(self, parser: StreamParser) -> None:
        """Read what `parser` is fed with, control tokens included."""
        self._parser: StreamParser | None = parser
        self._call = ""  # as far as it is written
        self._space: str | None = None  # behind what was given of a text; None before any
        self._ready = self._parts(parser.initial_events)

    def feed(self, text: str) -> list[AnswerPart]:
        ready, self._ready = self._ready, []
        if self._parser is None:
            return [*ready, text]
        try:
            events = self._parser.feed(text)
        except ValueError as error:  # a region that is not what its template says
            return [*ready, *self._unreadable(text, error)]
        return [*ready, *self._parts(events)]

    def finish(self) -> list[AnswerPart]:
        ready, self._ready = self._ready, []
        if self._parser is None:
            return ready
        try:
            events = self._parser.finalize()[1]
        except ValueError as error:
            return [*ready, *self._unreadable("", error)]
        return [*ready, *self._parts(events)]

    def _unreadable(self, text: str, error: ValueError) -> list[AnswerPart]:
        self._parser = None  # where the next region begins, it cannot say any more
        reason = str(error).strip().splitlines()[0]
        return [UnreadableCall(self._call + text, reason, call_id())]

    def _parts(self, events: Iterable[Mapping[str, Any]]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_open":
                self._space = None
            elif field == "tool_calls":
                parts += self._calls(event)
            elif kind == "region_chunk":
                text = self._stripped(event["text"])
                if text and field in _REASONING:
                    parts.append(Reasoning(text))
                elif text and field == "content":
                    parts.append(text)
        return parts

    def _calls(self, event: Mapping[str, Any]) -> list[AnswerPart]:
        if event["type"] == "region_chunk":
            self._call += event["text"]
            return []
        found, text = event["value"], self._call
        self._call = ""
        return [checked_call(one, text) for one in (found if isinstance(found, list) else [found])]

    def _stripped(self, text: str) -> str:
        """A piece without the white space around the whole."""
        text = text.lstrip() if self._space is None else self._space + text
        certain = text.rstrip()
        if certain or self._space is not None:
            self._space = text[len(certain) :]
        return certain


def checked_call(found: Any, text: str) -> ToolCall | UnreadableCall:
    """A call of what was read, if it is one.

    Args:
        found: `{"name", "arguments"}`, or that as the `function` of a call.
        text: As the model wrote it.
    """
    function = found.get("function", found) if isinstance(found, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            arguments = None
    elif arguments is None and isinstance(function, Mapping) and "arguments" not in function:
        arguments = function.get("parameters", {})
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return UnreadableCall(text, "a call has a name and arguments by their names", call_id())
    return ToolCall(name, dict(arguments), call_id())


def _open_end(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string`."""
    sizes = range(min(len(text), len(string) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(string[:size])), 0)
