"""A conversation as an engine answers it: tools, thoughts, and documents in tools' results.

Every framework's messages become the same turns, those that chat templates read.  This module
decides how a model calls tools and how its answer is read.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.forks import new_lock
from kvcache_rag.generation.grammar import JsonGrammars
from kvcache_rag.generation.tools import (
    JsonReader,
    TemplateReader,
    ThoughtReader,
    ToolCall,
    ToolChoice,
    json_turns,
    read_whole,
)
from kvcache_rag.models.responses import known_template, own_template, stream_parser

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.generation.tools import AnswerReader, ToolForm

JSON_FORM: Final = (
    "chat template or tokenizer of this model do not say how tools are called "
    "(tokenizer.response_template, and a chat template that writes tools behind the system "
    "message), so calls are held to JSON by a grammar: they fit their tools' schemas, sensible or "
    "not"
)
"""The warning, given once, if `ConversationForm.tool_form` is "json" for want of another form."""

_BEGINNING: Final = 48  # characters by which a text is known again


@dataclass(frozen=True)
class ConversationForm:
    """How a conversation is put to a model, and how its answer is read.

    Attributes:
        turns: Turns as the chat template reads them; the last one asks, or is a tool's result.
        options: Arguments for the engine's `generate`, `complete` and their streams.
        tool_form: How tool calls are written; "" if there are none.
        template: The response template for reading answers, or None.
        thinks: Whether the prompt may end with `<think>`.
        choice: Tools for the answer.
        is_native: Whether turns hold calls and results as the chat template reads them.
        is_fallback: Whether calls are written as JSON because the model has no form of its own.
        chat: Arguments of `Engine.render_chat`.
    """

    turns: tuple[dict[str, Any], ...]
    options: dict[str, Any]
    tool_form: ToolForm
    template: Mapping[str, Any] | None
    thinks: bool
    choice: ToolChoice
    is_native: bool
    is_fallback: bool = False
    chat: dict[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> tuple[str, tuple[dict[str, Any], ...]]:
        """The question ("" after a tool's result) and the turns before it."""
        if self.turns and self.turns[-1]["role"] == "user":
            return self.turns[-1]["content"], self.turns[:-1]
        return "", self.turns

    def reader(self, prompt: Callable[[], str]) -> AnswerReader | None:
        """A reader for one answer; None if an answer is just its text.

        Args:
            prompt: Writes the prompt, or the part of it after the documents.
        """
        if self.tool_form == "json":
            return JsonReader()
        if self.template is not None:
            return TemplateReader(stream_parser(self.template, prompt(), self.choice.tools))
        if "logits_processor" in self.options:
            return None  # held to a grammar of somebody else, which allows no thoughts
        return ThoughtReader(self.thinks and prompt().rstrip().endswith("<think>"))


class ConversationForms:
    """The forms that an engine's model knows.  Thread-safe.

    Attributes:
        known: All instances, by engine.
    """

    known: ClassVar[weakref.WeakKeyDictionary[Any, ConversationForms]] = weakref.WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = new_lock()

    def __init__(self, engine: Engine) -> None:
        """Ask nothing of the engine yet."""
        # Not the engine itself, by which its forms are known.
        self._renderer, self._model = engine._bound.renderer, engine.model
        self._tokenizer = self._renderer.encoder.tokenizer

    @classmethod
    def of(cls, engine: Engine) -> ConversationForms:
        """The forms of an engine, kept as long as its tokenizer does not change."""
        with cls._lock:
            known = cls.known.get(engine)
            if known is None or not known._is_current(engine):
                known = cls.known[engine] = cls(engine)
            return known

    def _is_current(self, engine: Engine) -> bool:
        return self._renderer is engine._bound.renderer

    @property
    def has_chat_template(self) -> bool:
        """Whether a chat template writes messages."""
        return bool(self._renderer.chat_template)

    @cached_property
    def grammars(self) -> JsonGrammars:
        """Compiled grammars over the model's tokens."""
        return JsonGrammars(self._model, self._tokenizer)

    @cached_property
    def native(self) -> Mapping[str, Any] | None:
        """The response template that reads calls in the model's own form, or None.

        The one that transformers knows for the model's type counts if it reads the call that the
        chat template writes.
        """
        if not self._renderer.writes_tools:
            return None
        own = own_template(self._tokenizer)
        if own is not None:
            return own
        template = known_template(self._tokenizer, self._model)
        return template if template is not None and self._reads_calls(template) else None

    def _reads_calls(self, template: Mapping[str, Any]) -> bool:
        from kvcache_rag.prompt.renderer import PROBE_CALL, PROBE_TOOL  # loads torch

        asked = {"role": "user", "content": "c"}
        function = PROBE_CALL[0]["tool_calls"][0]["function"]
        try:
            prompt = self._renderer.render_chat([asked])
            # The template ends with a new generation prompt; the call stands before it.
            written = self._renderer.render_chat([asked, PROBE_CALL[0]])
            parser = stream_parser(template, prompt, [PROBE_TOOL])
            parts = read_whole(TemplateReader(parser), written.removeprefix(prompt))
        except (InvalidInputError, ValueError, KeyError, TypeError):
            return False
        calls = [part for part in parts if isinstance(part, ToolCall)]
        return [(one.name, one.arguments) for one in calls] == [
            (function["name"], function["arguments"])
        ]

    @cached_property
    def thinks(self) -> bool:
        """Whether the chat template writes `<think>`, perhaps at the end of a prompt."""
        return "<think>" in str(self._renderer.chat_template or "")

    def form(
        self,
        turns: Sequence[Mapping[str, Any]],
        choice: ToolChoice,
        values: Mapping[str, Any] | None = None,
        *,
        is_held: bool = False,
    ) -> ConversationForm:
        """Choose how to ask a conversation and read its answer.

        Args:
            turns: Turns as chat templates read them, including tool calls and results.
            choice: Tools for the answer.
            values: `chat_template_kwargs` for this question.
            is_held: Whether the caller's own grammar holds the answer.

        Raises:
            InvalidInputError: If a tool's schema cannot be used.
            MissingExtraError: If calls must be held to JSON and llguidance is not installed.
        """
        has_calls = choice.may_call or any(
            turn["role"] == "tool" or turn.get("tool_calls") for turn in turns
        )
        is_native = has_calls and self.native is not None
        options: dict[str, Any] = {}
        chat: dict[str, Any] = {"chat_template_kwargs": dict(values)} if values else {}
        tool_form: ToolForm = ""
        is_fallback = False
        template = None if is_held else own_template(self._tokenizer)
        written = [dict(turn) for turn in turns]
        if choice.may_call and is_native and not choice.must_call:
            tool_form, template = "native", self.native
            chat["tools"] = choice.tools
        elif choice.may_call:
            is_fallback = not is_native and not choice.must_call
            # Of what is free, no grammar says that a call must be among it.
            tool_form, template, is_native = "json", None, False
            held = self.grammars.processor(choice.schema(), is_lenient=not choice.is_strict)
            options["logits_processor"] = [held]
        if has_calls and not is_native:
            instruction = choice.instruction() if tool_form == "json" else ""
            written = json_turns(written, instruction)
        if template is not None:
            options["skip_special_tokens"] = False
        return ConversationForm(
            turns=tuple(written),
            options=options,
            tool_form=tool_form,
            template=template,
            thinks=self.thinks and not is_held,
            choice=choice,
            is_native=is_native,
            is_fallback=is_fallback,
            chat=chat,
        )


def reference_to(text: str, number: int) -> str:
    """How a message refers to a document placed before the conversation."""
    beginning = " ".join(text.split())
    if len(beginning) > _BEGINNING:
        beginning = beginning[:_BEGINNING].rsplit(" ", 1)[0] + "…"
    return f'[document {number} above: "{beginning}"]'


def referring(content: str, texts: Sequence[str], place: Callable[[str], int]) -> str:
    """A tool's result, with the documents in it replaced by references to their chunks.

    Args:
        content: The result, with each of `texts` in it as a whole.
        texts: Texts in the order in which they occur in `content`.
        place: The number of a document in the prompt, from 1.
    """
    places, at = [], 0
    for text in texts:
        start = content.index(text, at)
        at = start + len(text)
        places.append((start, at, reference_to(text, place(text))))
    return replaced(content, places)


def replaced(content: str, places: Iterable[tuple[int, int, str]]) -> str:
    """A text with some places replaced.

    Args:
        content: The text.
        places: Beginning, end and new text of each, in order.
    """
    parts, at = [], 0
    for start, end, text in places:
        parts += [content[at:start], text]
        at = end
    return "".join([*parts, content[at:]])


def whole_texts(content: str, texts: Sequence[str]) -> list[str]:
    """The `texts` that occur in `content`, one after the other, each as whole words."""
    return [text for _, text in whole_places(content, texts)]


def whole_places(content: str, texts: Sequence[str]) -> list[tuple[int, str]]:
    """`whole_texts`, each after the index of its first character."""
    found, at = [], 0
    for text in texts:
        start = content.find(text, at) if text.strip() else -1
        end = start + len(text)
        if start < 0 or _in_word(content, start) or _in_word(content, end):
            continue
        found.append((start, text))
        at = end
    return found


def _in_word(text: str, place: int) -> bool:
    """Whether a place between two characters is within a word."""
    return text[place - 1 : place].isalnum() and text[place : place + 1].isalnum()
