"""What a framework asks of an engine: its messages, documents or nodes as one `Question`.

A framework maps its classes to `FrameworkMessage` and `Source`.  This module decides which
documents are chunks, what follows them, and which of them an answer names as its sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.generation.question import Question
from kvcache_rag.generation.tools import ToolChoice
from kvcache_rag.integration.chat import reference_to, replaced
from kvcache_rag.prompt.conversation import instructed, joined, said
from kvcache_rag.prompt.scores import scores_by_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from typing_extensions import Self

    from kvcache_rag.engine import Engine
    from kvcache_rag.generation.question import ChunkInput, StoredChunk
    from kvcache_rag.generation.stream import AnswerStream
    from kvcache_rag.generation.tools import AnswerPart, AnswerReader
    from kvcache_rag.integration.chat import ConversationForm
    from kvcache_rag.integration.references import Reference
    from kvcache_rag.metrics import Answer, Metrics
    from kvcache_rag.prompt.conversation import Turn

PromptKind: TypeAlias = Literal["plain", "reused", "rearranged", "pasted"]
"""What happened to the caller's prompt.

"reused": its chunks were answered from in place.  "rearranged": something before or between them
was moved after them.  "pasted": it has a context of which nothing could be a chunk.  "plain": it
has none.
"""

_ALONE = ("tool", "assistant")  # roles of which each message is a step of its own


@dataclass(frozen=True)
class Source:
    """A document or node whose text may be a chunk.

    Attributes:
        text: Text as in prompts.
        id: Its id, or None.
        score: How well it matches, if the retriever says so.
        place: Its number among all that were given, including equal and empty ones.
        reference: Where its KV is, if noted with it.
    """

    text: str
    id: str | None = None
    score: Any = None
    place: int = 0
    reference: Reference | None = None

    def chunk(self, engine: Engine) -> StoredChunk | str:
        """What to pass to `engine`: a valid reference, else the text."""
        return self.text if self.reference is None else self.reference.chunk(self.text, engine)


@dataclass(frozen=True)
class SourcedQuestion:
    """A question for an engine, and the sources of its chunks.

    Attributes:
        question: The question.
        sources: One for each chunk.
        prompt: What happened to the caller's prompt.
    """

    question: Question
    sources: tuple[Source, ...] = ()
    prompt: PromptKind = "plain"

    @classmethod
    def over(
        cls,
        text: str,
        sources: Sequence[Source],
        chunks: Sequence[ChunkInput],
        *,
        prefix_mismatch: bool,
        **options: Any,
    ) -> Self:
        """A question over chunks.

        Args:
            text: The text after the chunks and the history.
            sources: Sources of the chunks.
            chunks: Chunks as the engine takes them.
            prefix_mismatch: Whether the caller wanted other text before the chunks.
            options: See `Engine.generate`.
        """
        kind: PromptKind = "rearranged" if prefix_mismatch else "reused"
        question = Question(text, tuple(chunks), {**options, "prefix_mismatch": prefix_mismatch})
        return cls(question, tuple(sources), kind if sources else "plain")

    @classmethod
    def text(cls, text: str, prompt: PromptKind = "plain") -> Self:
        """A text to continue as it is."""
        return cls(Question(text, is_completion=True), prompt=prompt)

    def answer(self, engine: Engine, options: Mapping[str, Any]) -> Answer:
        """Answer; `options` of the call override those of the question."""
        asked = self.question
        if asked.is_completion:
            return engine.complete(asked.text, **options)
        return engine.generate(asked.text, asked.chunks, **{**asked.options, **options})

    def stream(self, engine: Engine, options: Mapping[str, Any]) -> AnswerStream:
        """`answer`, piece by piece."""
        asked = self.question
        if asked.is_completion:
            return engine.stream_complete(asked.text, **options)
        return engine.stream(asked.text, asked.chunks, **{**asked.options, **options})

    def cost(self, metrics: Metrics) -> dict[str, Any]:
        """An answer's `kv_cache`; chunks are given by the places of their sources."""
        found, sources = metrics.to_dict(), self.sources
        numbered = {
            name: [{**one, "chunk": sources[one["chunk"]].place} for one in found[name]]
            for name in ("missed", "relevance")
        }
        used = [sources[at] for at in metrics.answered_from]
        return {
            **found,
            **numbered,
            "answered_from": [one.place for one in used],
            "answered_from_ids": [one.id for one in used],
            "prompt": self.prompt,
        }


def as_chunks(
    steps: Iterable[Iterable[Source]],
) -> tuple[tuple[Source, ...], tuple[float, ...] | None]:
    """The sources that are chunks, and their scores if these say more than the order.

    Of equal texts the first is a chunk; a source without text is none.

    Args:
        steps: What each search found, or one message contained, earliest first.
    """
    found = [[one for one in step if one.text.strip()] for step in steps]
    chunks: dict[str, Source] = {}
    for step in found:
        for one in step:
            chunks.setdefault(one.text, one)
    scores = scores_by_step([(one.text, one.score) for one in step] for step in found)
    known = None if scores is None else tuple(scores[text] for text in chunks)
    return tuple(chunks.values()), known


# ---------------------------------------------------------------------- messages
@dataclass(frozen=True)
class MessagePart:
    """A text of a message, or a document in it.

    Attributes:
        text: The text; "" for a document.
        source: The document.
        within: Documents in the text, in order, each after the indices where it begins and ends;
            white space at its ends may be missing.
    """

    text: str = ""
    source: Source | None = None
    within: tuple[tuple[int, int, Source], ...] = ()

    @property
    def sources(self) -> list[Source]:
        """The documents in it."""
        return [one for *_, one in self.within] if self.source is None else [self.source]

    def referring(self, numbers: Mapping[str, int]) -> str:
        """The text, with references in place of the documents, by their texts."""
        if self.source is not None:
            text = self.source.text
            return reference_to(text, numbers[text]) if text.strip() else ""
        return replaced(
            self.text,
            [
                (start, end, reference_to(one.text, numbers[one.text]))
                for start, end, one in self.within
            ],
        )


@dataclass(frozen=True)
class FrameworkMessage:
    """A message of a framework.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        parts: Texts, and documents between them.
        more: What else chat templates read: tool calls, or whose result it is.
    """

    role: str
    parts: tuple[MessagePart, ...]
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text without the documents."""
        return "\n".join(part.text for part in self.parts if part.text)

    @property
    def sources(self) -> list[Source]:
        """The documents in it."""
        return [one for part in self.parts for one in part.sources]

    def turn(self, numbers: Mapping[str, int] | None = None) -> Turn:
        """The message as chat templates read it.

        Args:
            numbers: Numbers of the documents among the chunks, by text.  A tool's result is part of
                the conversation, so it refers to them.
        """
        content = self.text
        if self.role == "tool" and numbers is not None:
            content = "\n".join(filter(None, (part.referring(numbers) for part in self.parts)))
        return {**said(self.role, content), **self.more}


@dataclass(frozen=True)
class AskedMessages:
    """Messages in the order of a prompt: documents, then the turns.

    Attributes:
        turns: Turns; the last one asks, or is a tool's result.  Those of one role are joined.
        sources: Sources of the chunks.
        scores: Scores of the chunks, if a reranker or several steps say more than their order.
        is_grounded: Whether there are documents, even empty ones; then the engine's own instruction
            applies.
        prefix_mismatch: Whether an instruction could not be placed before the chunks.
        asked: The user's last message, without additions from other turns and instructions.
    """

    turns: tuple[Turn, ...]
    sources: tuple[Source, ...] = ()
    scores: tuple[float, ...] | None = None
    is_grounded: bool = False
    prefix_mismatch: bool = False
    asked: str = ""

    @classmethod
    def from_messages(
        cls, messages: Sequence[FrameworkMessage], *own: str, suffix: str = ""
    ) -> Self:
        """Sort messages, oldest first.

        Args:
            messages: Messages; any of them may have documents.
            own: The instruction that the chunks were computed after, in each of its forms.
            suffix: Written after the last user message.

        Raises:
            InvalidInputError: If no message has text.
        """
        places = count()
        steps = [
            [replace(one, place=next(places)) for _, message in step for one in message.sources]
            for _, step in groupby(enumerate(messages), _step)
        ]
        if not any(steps):
            turns = _ending(joined(message.turn() for message in messages), suffix)
            return cls(tuple(turns))
        sources, scores = as_chunks(steps)
        numbers = {one.text: number for number, one in enumerate(sources, start=1)}
        written, is_foreign = instructed([one.turn(numbers) for one in messages], *own)
        turns = _ending(written, suffix)
        spoken = (one.text for one in reversed(messages) if one.role == "user")
        asked = next((text for text in spoken if text.strip()), "")
        return cls(tuple(turns), sources, scores, True, is_foreign, asked)

    def question(
        self, form: ConversationForm, chunks: Sequence[ChunkInput], **options: Any
    ) -> SourcedQuestion:
        """The question over the documents, in the form that the model reads.

        Args:
            form: Form of `turns`.
            chunks: Chunks of the sources.
            options: See `Engine.generate`.
        """
        text, history = form.asked
        # The form may have written the tools' instruction into what the user said.
        asked = "" if text == self.asked else self.asked
        known = {"history": history, "scores": self.scores, "asked": asked}
        mismatch = self.prefix_mismatch
        return SourcedQuestion.over(
            text, self.sources, chunks, prefix_mismatch=mismatch, **known, **options
        )


def _step(numbered: tuple[int, FrameworkMessage]) -> int | None:
    """The documents that one call of a tool found, or one turn of the user brought, are a step."""
    number, message = numbered
    return number if message.role in _ALONE else None


def _ending(turns: list[Turn], suffix: str) -> list[Turn]:
    if not turns:
        raise InvalidInputError("there is no message with text; ask something")
    if suffix and turns[-1]["role"] == "user":
        turns[-1] = said("user", turns[-1]["content"] + suffix)
    elif suffix:
        turns.append(said("user", suffix.strip()))
    return turns


# ---------------------------------------------------------------------- arguments and answers
def take_choice(
    options: dict[str, Any], describe: Callable[[Sequence[Any]], list[Any]] = list
) -> ToolChoice:
    """Remove the arguments about tools from those of a call.

    Args:
        options: Arguments of the call.
        describe: Turns tools into what chat templates read.

    Raises:
        InvalidInputError: If tools cannot be used.
    """
    names = ("tools", "tool_choice", "parallel_tool_calls")
    given, choice, parallel = (options.pop(name, None) for name in names)
    tools = describe(given or ())
    return ToolChoice.of(tools, choice if tools else None, parallel)


def with_form(
    options: Mapping[str, Any], form: ConversationForm, *, is_grounded: bool
) -> dict[str, Any]:
    """Arguments of a call and of its form; over chunks the engine writes the turns."""
    added = {**form.options, **(form.chat if is_grounded else {})}
    parts = (options, form.options)
    processors = [one for part in parts for one in part.get("logits_processor") or ()]
    return {**options, **added, **({"logits_processor": processors} if processors else {})}


class TextReader:
    """Reads answers that are plain text."""

    def feed(self, text: str) -> list[AnswerPart]:
        return [text] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


def answer_reader(form: ConversationForm, prompt: Callable[[], str]) -> AnswerReader:
    """A reader for one answer; `prompt` as for `ConversationForm.reader`."""
    return form.reader(prompt) or TextReader()
