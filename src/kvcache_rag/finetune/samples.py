"""What is learned, as texts and as the token ids that the engine itself would use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag.prompt import PromptRenderer

_MARK = "@@kvcache-rag-answer@@"


@dataclass(frozen=True)
class Asked:
    """A question about a context.

    Attributes:
        question: Its text.
        answer: The text to learn.
        relevant: Indices of the documents that hold the answer, empty if not known.
    """

    question: str
    answer: str
    relevant: tuple[int, ...] = ()


@dataclass(frozen=True)
class QASample:
    """Documents, in prompt order, and the questions about them; no documents: chunk-free."""

    documents: tuple[str, ...]
    questions: tuple[Asked, ...]


@dataclass(frozen=True)
class PlainSample:
    """A text, or a dialogue that ends with the assistant's turn."""

    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Span:
    """What follows a context.

    Attributes:
        prompt: Ids that are read only.
        target: Ids that are learned, each from everything before it.
        weights: For "selection": how much each chunk token matters, any scale; empty otherwise.
    """

    prompt: tuple[int, ...]
    target: tuple[int, ...]
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """A sample as token ids.

    Attributes:
        prefix: The shared prefix, before every chunk.
        chunks: Ids of each chunk.
        spans: Do not see each other.
    """

    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]

    @property
    def context_tokens(self) -> int:
        """Tokens of prefix and chunks."""
        return len(self.prefix) + sum(map(len, self.chunks))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest single prompt with its target."""
        longest = max(len(span.prompt) + len(span.target) for span in self.spans)
        return self.context_tokens + longest

    @property
    def row_tokens(self) -> int:
        """Tokens of the packed forward pass under the block mask, copies of the prefix included."""
        copies = len(self.prefix) * max(0, len(self.chunks) - 1)
        packed = sum(len(span.prompt) + len(span.target) for span in self.spans)
        return self.context_tokens + copies + packed

    @property
    def joined(self) -> Encoded:
        """The same under full attention: one causal context."""
        context = self.prefix + tuple(token for chunk in self.chunks for token in chunk)
        return Encoded(context, (), self.spans)


class Encoder:
    """Turns samples into ids.

    Prompts are rendered by the engine's own renderer; an answer is tokenised apart and ends with
    the token at which generation stops.
    """

    def __init__(self, renderer: PromptRenderer, tokenizer: Any) -> None:
        """Bind a renderer and its tokenizer.

        Raises:
            InvalidInputError: If the tokenizer has no end-of-sequence token.
        """
        self.renderer, self._tokenizer = renderer, tokenizer
        self._has_chat = bool(getattr(tokenizer, "chat_template", None))
        self._end = self._end_of_turn()

    def qa(self, sample: QASample) -> Encoded:
        """Ids of a context with its questions."""
        spans = tuple(
            Span(
                self.renderer.query_ids(self.renderer.template.ask(asked.question)),
                self._answer(asked.answer),
            )
            for asked in sample.questions
        )
        chunks = tuple(map(self.renderer.chunk_ids, sample.documents))
        return Encoded(self.renderer.prefix_ids, chunks, spans)

    def plain(self, sample: PlainSample, longest: int) -> Encoded | None:
        """Ids of a text or dialogue, cut at `longest`; None if fewer than two are left."""
        if sample.messages:
            opened = self.renderer.render_chat(sample.messages[:-1])
            ids = self.renderer.text_ids(opened) + self._answer(sample.messages[-1]["content"])
        else:
            ids = self.renderer.text_ids(sample.text)
        if len(ids) < 2:
            return None
        return Encoded((), (), (Span(ids[:1], ids[1:longest]),))

    def _answer(self, text: str) -> tuple[int, ...]:
        # Behind "Answer:" a word begins with a space; a chat template leaves none to be written.
        written = text if self._has_chat else f" {text}"
        return (*self._ids(written), self._end)

    def _ids(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return ids

    def _end_of_turn(self) -> int:
        """The token that ends the assistant's turn: the chat template's, else end of sequence."""
        if self._has_chat:
            behind = self._behind_an_answer()
            special = set(self._tokenizer.all_special_ids)
            ids = [one for one in self._ids(behind) if one in special] if behind else []
            if ids:
                return ids[0]
        end = self._tokenizer.eos_token_id
        if end is None:
            raise InvalidInputError(
                "the tokenizer has no end-of-sequence token, so an answer could not be told to "
                "end; set tokenizer.eos_token"
            )
        return int(end)

    def _behind_an_answer(self) -> str:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        try:
            text: str = self._tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception:  # a template refuses in its own way; the end of sequence does then
            return ""
        return text.partition(_MARK)[2]
