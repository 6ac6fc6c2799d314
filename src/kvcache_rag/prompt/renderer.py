"""Render a template with a tokenizer and give the ids that every path uses.

The tokenizer is duck-typed: `apply_chat_template`, `chat_template`, and a call that gives
`input_ids`.
"""

from __future__ import annotations

import datetime
import json
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.prompt.offsets import chunk_finder, written_chunk
from kvcache_rag.prompt.template import DEFAULT_DATE, Message, PromptTemplate, as_messages
from kvcache_rag.prompt.tokens import Cover, Finder, Seam, TextEncoder, Writer, never

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


_SENTINEL = "@@kvcache-rag-context@@"

# Stands for whatever is said, when the template is looked at.
_SOMETHING: Final = "\U000f0000"

_Place = Callable[[list[dict[str, str]], str], list[dict[str, str]]]

_SPOKEN: Final = itemgetter("content")

_CLOCKS = (datetime.date(2001, 2, 3), datetime.date(2033, 11, 22))

_CLOCK = re.compile(
    r"strftime_now\(\s*(?:format\s*=\s*)?(?P<quote>['\"])(?P<format>.*?)(?P=quote)\s*\)"
)


@dataclass(frozen=True)
class PromptIds:
    """Token ids of a prompt, each part tokenised apart.

    Attributes:
        prefix: Everything before the first chunk, beginning-of-sequence token included.
        chunks: Each chunk with its wrapper.
        query: History, question and generation prompt.
    """

    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    query: tuple[int, ...]

    @property
    def context(self) -> tuple[int, ...]:
        """Prefix and chunks joined."""
        return self.prefix + tuple(token for chunk in self.chunks for token in chunk)

    @property
    def all(self) -> tuple[int, ...]:
        return self.context + self.query


class PromptRenderer:
    """A template bound to a tokenizer.

    Attributes:
        template: The template.
        prefix_text: What stands before the first chunk.
        prefix_ids: Its ids.
        encoder: Gives the ids of every text.
        has_control: Says of a chunk's text, by something true, that it would be read as a control
            token in part, and is encoded as text therefore.
    """

    def __init__(self, template: PromptTemplate, tokenizer: Any) -> None:
        """Find where the chunks stand in the chat template, and pin a date it prints."""
        self.template = template
        self._tokenizer = tokenizer
        self.encoder = TextEncoder.of(tokenizer)
        self._arguments: dict[str, Any] = dict(template.chat_template_kwargs)
        self._has_chat = bool(getattr(tokenizer, "chat_template", None))
        self._place = self._find_place()
        self._pin_date()
        self.prefix_text = self._split([], "?")[0]
        self.has_control = chunk_finder(self.encoder, template)
        self._is_said_control = self._said_finder()
        ids = self.encoder.encode(self.prefix_text)
        # A chat template writes its own beginning-of-sequence token, or means none.
        self.prefix_ids = tuple(ids) if self._has_chat else (*self._leading_bos(ids), *ids)

    def tokenize(
        self, question: str, chunks: Sequence[str], history: Sequence[Message | Mapping[str, str]]
    ) -> PromptIds:
        """All ids of a prompt.

        Raises:
            InvalidInputError: If `chunks` is one text, or a text is not valid Unicode.
        """
        if isinstance(chunks, str):
            raise InvalidInputError("chunks must be a list of texts, not one text")
        query = self.query_ids(question, history)
        return PromptIds(self.prefix_ids, tuple(map(self.chunk_ids, chunks)), query)

    def chunk_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a chunk's text in its wrapper."""
        written = self.chunk_text if self.has_control(text) else self.template.wrap
        return tuple(self.encoder.encode(written(text)))

    def chunk_text(self, text: str) -> str:
        """The text that `chunk_ids` reads."""
        return written_chunk(self.encoder, self.template, text)

    def query_ids(
        self,
        question: str,
        history: Sequence[Message | Mapping[str, str]] = (),
        answer: str | None = None,
    ) -> tuple[int, ...]:
        """Ids of history, question and generation prompt.

        Args:
            question: As it was asked.
            history: Earlier turns, oldest first.
            answer: What was found so far, in a later round of `overflow="refine"`.
        """
        return tuple(self.encoder.encode(self.query_text(question, history, answer)))

    def query_text(
        self,
        question: str,
        history: Sequence[Message | Mapping[str, str]] = (),
        answer: str | None = None,
    ) -> str:
        """The text that `query_ids` reads."""
        turns, template = as_messages(history), self.template
        if any(map(self._is_said_control, (question, answer or "", *map(_SPOKEN, turns)))):
            return self.encoder.compose(
                self._query_writer(question, turns, answer),
                self._query_writer(question, self._without_thoughts(turns), answer),
            )
        asked = template.ask(question) if answer is None else template.ask_again(question, answer)
        return self._split(turns, asked)[1]

    def _query_writer(
        self, question: str, turns: Sequence[Mapping[str, str]], answer: str | None
    ) -> Writer:
        def write(cover: Cover) -> str:
            said = cover(question)
            asked = (
                self.template.ask(said)
                if answer is None
                else self.template.ask_again(said, cover(answer))
            )
            return self._split(_covered(turns, cover), asked)[1]

        return write

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Messages as one prompt with generation prompt; plain text without a chat template."""
        turns = [dict(message) for message in messages]
        if any(map(self._is_said_control, _texts(turns))):
            for role in (turn.get("role", "") for turn in turns):
                if self.encoder.finder()(role):
                    raise InvalidInputError(f"{role!r} is no role; use user or assistant")
            return self.encoder.compose(
                self._chat_writer(turns), self._chat_writer(self._without_thoughts(turns))
            )
        return self._written(turns)

    def _chat_writer(self, turns: Sequence[Mapping[str, str]]) -> Writer:
        return lambda cover: self._written(_covered(turns, cover))

    def _written(self, turns: list[dict[str, str]]) -> str:
        if self._has_chat:
            return self._apply(turns)
        lines = [
            f"{turn.get('role', 'user').capitalize()}: {turn.get('content', '')}" for turn in turns
        ]
        return "\n".join([*lines, "Assistant:"])

    def _without_thoughts(self, turns: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """Turns with answers as many chat templates write them: behind the last `</think>`."""
        return [
            {**turn, "content": self.encoder.behind_control(turn["content"])}
            if turn.get("role") == "assistant" and isinstance(turn.get("content"), str)
            else dict(turn)
            for turn in turns
        ]

    def _said_finder(self) -> Finder:
        """What tells whether something said holds a literal, wherever the template puts it."""
        if self.template.special_tokens == "allow":
            return never
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        asked = {"role": "user", "content": "c"}
        chats = [[asked], [*turns, asked], [{"role": "system", "content": "d"}, *turns, asked]]
        writers = [
            self._query_writer("c", said, answer) for said in ([], turns) for answer in (None, "e")
        ]
        writers += map(self._chat_writer, chats)
        seams: set[Seam] = set()
        for write in writers:
            with suppress(InvalidInputError):  # a role that the template does not know
                parts = write(lambda _: _SOMETHING).split(_SOMETHING)
                seams.update(pairwise(parts))
        return self.encoder.finder(*seams)

    def compose(self, write: Writer) -> str:
        """A whole prompt of which parts were brought."""
        plain = write(str)
        if self.template.special_tokens == "allow" or not self.encoder.finder()(plain):
            return plain
        return self.encoder.compose(write)

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a whole prompt, with the beginning-of-sequence token exactly once."""
        ids = self.encoder.encode(text)
        return (*self._leading_bos(ids), *ids)

    def brought_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a text that stands alone, all of it brought."""
        if self.template.special_tokens == "allow":
            return tuple(self.encoder.encode(text))
        return tuple(self.encoder.encode_brought(text))

    def document_ids(self, text: str) -> tuple[int, ...]:
        """The same as a whole prompt."""
        ids = self.brought_ids(text)
        return (*self._leading_bos(ids), *ids)

    def _split(self, history: list[dict[str, str]], asked: str) -> tuple[str, str]:
        if self._place is None:
            spoken = "".join(
                f"\n{turn['role'].capitalize()}: {turn['content']}" for turn in history
            )
            return self.template.system, f"{spoken}\nQuestion: {asked}\nAnswer:"
        before, _, behind = self._apply(self._place(history, asked)).partition(_SENTINEL)
        return before, behind

    def _find_place(self) -> _Place | None:
        if not self._has_chat:
            return None
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        refusals = []
        for place in (self._in_system, self._in_first_user):
            try:
                short, long = self._apply(place([], "c")), self._apply(place(turns, "d"))
            except InvalidInputError as error:
                refusals.append(str(error))
                continue
            once = short.count(_SENTINEL) == 1 and long.count(_SENTINEL) == 1
            if once and short.partition(_SENTINEL)[0] == long.partition(_SENTINEL)[0]:
                return place
        raise InvalidInputError(
            refusals[-1]
            if len(refusals) == 2
            else "the tokenizer's chat template puts something else before the first message, so "
            "nothing can be cached behind a fixed prefix; set tokenizer.chat_template to None or "
            "to one that keeps the order of messages"
        )

    def _in_system(self, history: list[dict[str, str]], asked: str) -> list[dict[str, str]]:
        system = {"role": "system", "content": self.template.system + _SENTINEL}
        return [system, *history, {"role": "user", "content": asked}]

    def _in_first_user(self, history: list[dict[str, str]], asked: str) -> list[dict[str, str]]:
        turns = [*history, {"role": "user", "content": asked}]
        opened = {"role": "user", "content": f"{self.template.system}{_SENTINEL}"}
        if turns[0]["role"] == "user":
            opened["content"] += "\n" + turns.pop(0)["content"]
        return [opened, *turns]

    def _apply(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **self._arguments,
            )
        except Exception as error:  # a template refuses in its own words, with whatever it likes
            reason = str(error).strip().splitlines()
            raise InvalidInputError(
                "the tokenizer's chat template cannot write these messages: "
                f"{reason[0] if reason else type(error).__name__}"
            ) from error
        return rendered

    def _pin_date(self) -> None:
        """Write a fixed date into a chat template that prints today's."""
        if self._place is None or "strftime_now" not in self._tokenizer.get_chat_template():
            return
        probe = self._place([], "?")
        seen = []
        for day in _CLOCKS:
            self._arguments["chat_template"] = self._dated(day)
            seen.append(self._apply(probe))
        date = self.template.template_date
        self._arguments["chat_template"] = self._dated(date or DEFAULT_DATE)
        if len(set(seen)) > 1 and date is None:
            warnings.warn(
                f"the chat template prints today's date; it is pinned to {DEFAULT_DATE} so that "
                "cached chunks stay valid tomorrow; set PromptTemplate(template_date=...) to "
                "choose another",
                stacklevel=2,
            )

    def _dated(self, day: datetime.date) -> str:
        # transformers turns functions among a template's variables into text, so the clock cannot
        # be handed in; its calls are replaced by what they would give.
        text: str = self._tokenizer.get_chat_template()
        return _CLOCK.sub(lambda found: json.dumps(day.strftime(found["format"])), text)

    def _leading_bos(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The token that this tokenizer puts at the start by habit, unless it is there already."""
        bos = getattr(self._tokenizer, "bos_token_id", None)
        if (
            bos is None
            or list(ids[:1]) == [bos]
            or bos not in self._tokenizer("", verbose=False)["input_ids"]
        ):
            return ()
        return (bos,)


def _covered(turns: Sequence[Mapping[str, str]], cover: Cover) -> list[dict[str, str]]:
    """Turns of which everything but the roles is covered."""
    return [
        {
            name: value if name == "role" else _covered_value(value, cover)
            for name, value in turn.items()
        }
        for turn in turns
    ]


def _covered_value(value: Any, cover: Cover) -> Any:
    if isinstance(value, str):
        return cover(value)
    if isinstance(value, list):
        return [_covered_value(item, cover) for item in value]
    if isinstance(value, dict):  # a part of a message; its type is for the template
        return {
            name: item if name == "type" else _covered_value(item, cover)
            for name, item in value.items()
        }
    return value


def _texts(value: Any) -> Iterator[str]:
    """All texts of a message, roles too: one with a literal is nobody's."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
