"""What a framework asks of an engine: its messages, documents or nodes as one `Question`.

A framework says what its own classes are (`FrameworkMessage`, `Source`).  Which documents are
chunks, what stands behind them, and which of them an answer is told to be from is decided here.
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
"""What became of the caller's prompt.

"reused": its chunks were answered from where they stood.  "rearranged": something stood before or
between them that stands behind them now.  "pasted": it has a context of which nothing could be a
chunk.  "plain": it has none.
"""

_ALONE = ("tool", "assistant")  # roles of which each message is a step of its own


@dataclass(frozen=True)
class Source:
    """A document or node whose text may be a chunk.

    Attributes:
        text: As it stands in prompts.
        id: Its own; None if it has none.
        score: How well it matches, if whoever retrieved it says so.
        place: Its number among all that were handed over, equal and empty ones included.
        reference: Where its KV is, if that is noted beside it.
    """

    text: str
    id: str | None = None
    score: Any = None
    place: int = 0
    reference: Reference | None = None

    def chunk(self, engine: Engine) -> StoredChunk | str:
        """What to hand to `engine`: by reference if that still holds, else the text."""
        return self.text if self.reference is None else self.reference.chunk(self.text, engine)


@dataclass(frozen=True)
class SourcedQuestion:
    """A question for an engine, and whose texts its chunks are.

    Attributes:
        question: It.
        sources: One for each chunk.
        prompt: What became of the caller's prompt.
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
            text: What stands behind the chunks and the history.
            sources: Of the chunks.
            chunks: As the engine takes them.
            prefix_mismatch: Whether the caller wanted something else before the chunks.
            options: As of `Engine.generate`.
        """
        kind: PromptKind = "rearranged" if prefix_mismatch else "reused"
        question = Question(text, tuple(chunks), {**options, "prefix_mismatch": prefix_mismatch})
        return cls(question, tuple(sources), kind if sources else "plain")

    @classmethod
    def text(cls, text: str, prompt: PromptKind = "plain") -> Self:
        """A text that is continued as it is."""
        return cls(Question(text, is_completion=True), prompt=prompt)

    def answer(self, engine: Engine, options: Mapping[str, Any]) -> Answer:
        """Answer; `options` of the call win over those of the question."""
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
        """What is told of an answer as `kv_cache`; chunks go by the places of their sources."""
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
    """The sources that are chunks, and their scores where these say more than the order.

    What is read twice says no more, so of equal texts the first is a chunk; what has none is none.

    Args:
        steps: What each search found, or was brought at once, earliest first.
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
        text: What is said; "" for a document.
        source: The document.
        within: Documents that stand in the text, in its order, each behind the indices where it
            begins and ends there; white space at its own ends may be missing.
    """

    text: str = ""
    source: Source | None = None
    within: tuple[tuple[int, int, Source], ...] = ()

    @property
    def sources(self) -> list[Source]:
        """The documents in it."""
        return [one for *_, one in self.within] if self.source is None else [self.source]

    def referring(self, numbers: Mapping[str, int]) -> str:
        """What is said, with references to the documents, by their texts."""
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
        more: What else chat templates read of it: calls of tools, or whose result it is.
    """

    role: str
    parts: tuple[MessagePart, ...]
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What is said beside the documents."""
        return "\n".join(part.text for part in self.parts if part.text)

    @property
    def sources(self) -> list[Source]:
        """The documents in it."""
        return [one for part in self.parts for one in part.sources]

    def turn(self, numbers: Mapping[str, int] | None = None) -> Turn:
        """The message as chat templates read it.

        Args:
            numbers: Of the documents among the chunks, by their texts.  What a tool found is part
                of the conversation, so it refers to them.
        """
        content = self.text
        if self.role == "tool" and numbers is not None:
            content = "\n".join(filter(None, (part.referring(numbers) for part in self.parts)))
        return {**said(self.role, content), **self.more}


@dataclass(frozen=True)
class AskedMessages:
    """Messages in the order of a prompt: documents, and behind them the turns.

    Attributes:
        turns: The last one asks, or is what a tool said; those of one role are joined.
        sources: Of the chunks.
        scores: Of the chunks, where a reranker or several steps say more than their order.
        is_grounded: Whether there are documents, if only empty ones, which is a question for the
            engine's own instruction.
        prefix_mismatch: Whether an instruction could not stand before the chunks.
        asked: What the user said last, without what other turns and instructions add to it.
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
            messages: Documents may stand in any of them.
            own: The instruction that the chunks were computed behind, in each of its forms.
            suffix: Written behind the last user message.

        Raises:
            InvalidInputError: If nothing is said.
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
        """The question over the documents, in the form in which the model reads the turns.

        Args:
            form: Of `turns`.
            chunks: Of the sources.
            options: As of `Engine.generate`.
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
    """Take the arguments about tools out of those of a call.

    Args:
        options: Of the call.
        describe: Makes of tools what chat templates read.

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
    """Arguments of a call with what its form adds; over chunks the engine writes the turns."""
    added = {**form.options, **(form.chat if is_grounded else {})}
    parts = (options, form.options)
    processors = [one for part in parts for one in part.get("logits_processor") or ()]
    return {**options, **added, **({"logits_processor": processors} if processors else {})}


class TextReader:
    """Reads answers that are their text."""

    def feed(self, text: str) -> list[AnswerPart]:
        return [text] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


def answer_reader(form: ConversationForm, prompt: Callable[[], str]) -> AnswerReader:
    """What takes one answer apart; `prompt` as for `ConversationForm.reader`."""
    return form.reader(prompt) or TextReader()
