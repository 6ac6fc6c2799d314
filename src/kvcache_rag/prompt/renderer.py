"""Render a template with a tokenizer into the ids that every path uses.

The tokenizer is duck-typed: `apply_chat_template`, `chat_template`, and a call that gives
`input_ids`.
"""

from __future__ import annotations

import copy
import datetime
import json
import re
import warnings
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cachetools import LRUCache

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.forks import new_lock
from kvcache_rag.prompt.alignment import token_offsets
from kvcache_rag.prompt.offsets import chunk_finder, written_chunk
from kvcache_rag.prompt.template import (
    DEFAULT_DATE,
    ChatArguments,
    Message,
    PromptTemplate,
    as_messages,
)
from kvcache_rag.prompt.tokens import Cover, Finder, Seam, TextEncoder, Writer, never

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self


# Tokens of one namespace's chunks that are remembered, 1 MiB and their texts: tokenising 4,000
# takes as long as loading their caches.
_REMEMBERED: Final = 1 << 18

_NAMESPACES: Final = 64  # whose chunks are remembered

_Ids: TypeAlias = "LRUCache[str, array[int]]"

_SENTINEL = "@@kvcache-rag-context@@"

# Stands for whatever is said, when the template is looked at.
_SOMETHING: Final = "\U000f0000"

_Place = Callable[[list[dict[str, Any]], "str | None"], list[dict[str, Any]]]

_SPOKEN: Final = itemgetter("content")

_PLAIN: Final = 2  # parts of a turn, role and content, where it has no calls of tools

# A tool, its call and its result, to see how a chat template writes them.
PROBE_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "kvcache_rag_probe",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"f": {"type": "string", "description": "g"}},
            "required": ["f"],
        },
    },
}
PROBE_CALL: Final[list[dict[str, Any]]] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": "call00001",  # some templates want nine letters and digits
                "function": {"name": "kvcache_rag_probe", "arguments": {"f": "h"}},
            }
        ],
    },
    {
        "role": "tool",
        "name": "kvcache_rag_probe",
        "tool_call_id": "call00001",
        "content": "kvcache-rag-result",
    },
]

_CLOCKS = (datetime.date(2001, 2, 3), datetime.date(2033, 11, 22))

_CLOCK = re.compile(
    r"strftime_now\(\s*(?:format\s*=\s*)?(?P<quote>['\"])(?P<format>.*?)(?P=quote)\s*\)"
)


@dataclass(frozen=True)
class PromptIds:
    """Token ids of a prompt, each part tokenised separately.

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


MOST_ASKED: Final = 256
"""Tokens of a question whose likelihood is read; of a longer one, the last."""
_ANOTHER: Final = "kvcacheragquestion"


@dataclass(frozen=True)
class AskedIds:
    """A question as it stands behind chunks, without turns before it and up to its last token.

    Attributes:
        ids: What stands before the question, and the question.
        count: How many of the last are the question's own, `MOST_ASKED` at most.
    """

    ids: tuple[int, ...]
    count: int


class PromptRenderer:
    """A template bound to a tokenizer.

    Attributes:
        template: The template.
        namespace: Tenant; what was read for others is not remembered for it.
        prefix_text: What stands before the first chunk.
        prefix_ids: Its ids.
        chat_template: What writes messages; None or "" for none.
        encoder: Gives the ids of every text.
        has_control: Says of a chunk's text, by something true, that it would be read as a control
            token in part, and is encoded as text therefore.
    """

    def __init__(self, template: PromptTemplate, tokenizer: Any) -> None:
        """Find where the chunks stand in the chat template, and pin a date it prints."""
        self.template = template
        self._given = tokenizer
        self.encoder = TextEncoder.for_tokenizer(tokenizer)
        self._tokenizer = tokenizer = self.encoder.tokenizer
        self._arguments: dict[str, Any] = dict(template.chat_template_kwargs)
        if template.chat_template:
            self._arguments["chat_template"] = template.chat_template
        self.chat_template = template.chat_template or getattr(tokenizer, "chat_template", None)
        self._place = self._find_place()
        self._pin_date()
        self.prefix_text = self._split([], "?")[0]
        self.has_control = chunk_finder(self.encoder, template)
        self._is_said_control = self._said_finder()
        self.namespace = ""
        self._ids: LRUCache[str, _Ids] = LRUCache(_NAMESPACES)
        self._lock = new_lock()
        ids = self.encoder.encode(self.prefix_text)
        # A chat template writes its own beginning-of-sequence token, or means none.
        self.prefix_ids = tuple(ids) if self.chat_template else (*self._leading_bos(ids), *ids)

    def in_namespace(self, namespace: str) -> Self:
        """The same for another tenant, who cannot tell by the time which texts were read before."""
        other = copy.copy(self)
        other.namespace = namespace
        return other

    @property
    def is_current(self) -> bool:
        """Whether the tokenizer still reads texts as when this was made."""
        return self.encoder.reads_as(self._given)

    def tokenize(
        self, question: str, chunks: Sequence[str], history: Sequence[Message | Mapping[str, Any]]
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
        """Ids of a chunk's text in its wrapper; of those that were asked for lately, remembered."""
        with self._lock:
            remembered = self._remembered().get(text)
        if remembered is not None:
            return tuple(remembered)
        written = self.chunk_text if self.has_control(text) else self.template.wrap
        ids = tuple(self.encoder.encode(written(text)))
        with self._lock, suppress(ValueError):  # longer than all that is remembered
            self._remembered()[text] = array("i", ids)
        return ids

    def _remembered(self) -> _Ids:
        """Ids of the namespace's texts; for who holds the lock."""
        if self.namespace not in self._ids:
            self._ids[self.namespace] = LRUCache(_REMEMBERED, getsizeof=len)
        return self._ids[self.namespace]

    def forget(self) -> None:
        """Remember no text of the namespace any more."""
        with self._lock:
            self._ids.pop(self.namespace, None)

    def chunk_text(self, text: str) -> str:
        """The text that `chunk_ids` reads."""
        return written_chunk(self.encoder, self.template, text)

    def query_ids(
        self,
        question: str,
        history: Sequence[Message | Mapping[str, Any]] = (),
        answer: str | None = None,
        arguments: ChatArguments | None = None,
    ) -> tuple[int, ...]:
        """Ids of history, question and generation prompt.

        Args:
            question: As it was asked; "" where the history ends with what is to be answered.
            history: Earlier turns, oldest first.
            answer: What was found so far, in a later round of `overflow="refine"`.
            arguments: Tools and other values for the chat template.
        """
        return tuple(self.encoder.encode(self.query_text(question, history, answer, arguments)))

    def asked_ids(self, question: str) -> AskedIds:
        """Ids of a question by itself, and which are its own.

        Raises:
            InvalidInputError: If it has no tokens.
        """
        text = self.query_text(question)
        ids = self.encoder.encode(text)
        # Where it begins, another one begins, too.
        said, start = question.strip(), self.query_text(_ANOTHER).find(_ANOTHER)
        spaces = len(question) - len(question.lstrip())
        start = next((at for at in (start, start + spaces) if text.startswith(said, at)), -1)
        if start < 0:  # the chat template writes it otherwise
            start, said = 0, text
        # A token belongs to the question that has a character of it.
        own = [
            place
            for place, (first, stop) in enumerate(token_offsets(self.encoder.tokenizer, text, ids))
            if first < start + len(said) and stop > start
        ]
        # Nothing says how likely the first token of a pass is.
        own = [place for place in own if place]
        if not said or not own:
            raise InvalidInputError("the question is empty; ask something")
        stop = own[-1] + 1
        return AskedIds(tuple(ids[:stop]), min(stop - own[0], MOST_ASKED))

    def query_text(
        self,
        question: str,
        history: Sequence[Message | Mapping[str, Any]] = (),
        answer: str | None = None,
        arguments: ChatArguments | None = None,
    ) -> str:
        """The text that `query_ids` reads.

        Raises:
            InvalidInputError: If `arguments` change what stands before the chunks.
        """
        turns, template = as_messages(history), self.template
        said: Iterable[str] = (question, answer or "", *map(_SPOKEN, turns))
        if arguments is not None or max(map(len, turns), default=0) > _PLAIN:
            said = (*said, *_texts(turns), *_texts(arguments and [*arguments.tools]))
        if any(map(self._is_said_control, said)):
            return self.encoder.compose(
                self._query_writer(question, turns, answer, arguments),
                self._query_writer(question, self._without_thoughts(turns), answer, arguments),
            )
        if not question and turns and turns[-1]["role"] == "tool":
            return self._split(turns, None, arguments)[1]
        asked = template.ask(question) if answer is None else template.ask_again(question, answer)
        return self._split(turns, asked, arguments)[1]

    def _query_writer(
        self,
        question: str,
        turns: Sequence[Mapping[str, Any]],
        answer: str | None,
        arguments: ChatArguments | None = None,
    ) -> Writer:
        is_asked = bool(question) or not turns or turns[-1]["role"] != "tool"

        def write(cover: Cover) -> str:
            said = cover(question)
            asked = (
                self.template.ask(said)
                if answer is None
                else self.template.ask_again(said, cover(answer))
            )
            history = _covered(turns, cover)
            return self._split(
                history, asked if is_asked else None, _covered_tools(arguments, cover)
            )[1]

        return write

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], arguments: ChatArguments | None = None
    ) -> str:
        """Messages as one prompt with generation prompt; plain text without a chat template."""
        turns = [dict(message) for message in messages]
        if any(map(self._is_said_control, _texts([turns, arguments and [*arguments.tools]]))):
            for role in (turn.get("role", "") for turn in turns):
                if self.encoder.finder()(role):
                    raise InvalidInputError(f"{role!r} is no role; use user or assistant")
            return self.encoder.compose(
                self._chat_writer(turns, arguments),
                self._chat_writer(self._without_thoughts(turns), arguments),
            )
        return self._written(turns, arguments)

    def _chat_writer(
        self, turns: Sequence[Mapping[str, Any]], arguments: ChatArguments | None = None
    ) -> Writer:
        return lambda cover: self._written(_covered(turns, cover), _covered_tools(arguments, cover))

    def _written(self, turns: list[dict[str, Any]], arguments: ChatArguments | None = None) -> str:
        if self.chat_template:
            return self._apply(turns, arguments)
        lines = [
            f"{turn.get('role', 'user').capitalize()}: {turn.get('content', '')}" for turn in turns
        ]
        return "\n".join([*lines, "Assistant:"])

    def _without_thoughts(self, turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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
        if self.chat_template:
            probe = ChatArguments((PROBE_TOOL,))
            writers.append(self._query_writer("", [asked, *PROBE_CALL], None, probe))
            writers.append(self._chat_writer([asked, *PROBE_CALL], probe))
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
        return tuple(self.encoder.encode_untrusted(text))

    def document_ids(self, text: str) -> tuple[int, ...]:
        """The same as a whole prompt."""
        ids = self.brought_ids(text)
        return (*self._leading_bos(ids), *ids)

    def _split(
        self,
        history: list[dict[str, Any]],
        asked: str | None,
        arguments: ChatArguments | None = None,
    ) -> tuple[str, str]:
        if self._place is None:
            spoken = "".join(
                f"\n{turn['role'].capitalize()}: {turn['content']}" for turn in history
            )
            question = "" if asked is None else f"\nQuestion: {asked}"
            return self.template.system, f"{spoken}{question}\nAnswer:"
        written = self._apply(self._place(history, asked), arguments)
        before, _, behind = written.partition(_SENTINEL)
        if arguments is not None and before != self.prefix_text:
            raise InvalidInputError(
                "tools or chat_template_kwargs of one question change what its chat template "
                "writes before the documents, behind which they were computed; give "
                "chat_template_kwargs in PromptTemplate(chat_template_kwargs=...)"
            )
        return before, behind

    def _find_place(self) -> _Place | None:
        if not self.chat_template:
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

    def _in_system(self, history: list[dict[str, Any]], asked: str | None) -> list[dict[str, Any]]:
        system = {"role": "system", "content": self.template.system + _SENTINEL}
        last = [] if asked is None else [{"role": "user", "content": asked}]
        return [system, *history, *last]

    def _in_first_user(
        self, history: list[dict[str, Any]], asked: str | None
    ) -> list[dict[str, Any]]:
        turns = [*history, *([] if asked is None else [{"role": "user", "content": asked}])]
        opened = {"role": "user", "content": f"{self.template.system}{_SENTINEL}"}
        if turns[0]["role"] == "user":
            opened["content"] += "\n" + turns.pop(0)["content"]
        return [opened, *turns]

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], arguments: ChatArguments | None = None
    ) -> str:
        values = self._arguments
        if arguments is not None:
            values = {**values, **arguments.options()}
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **values,
            )
        except Exception as error:  # a template refuses in its own words, with whatever it likes
            reason = str(error).strip().splitlines()
            raise InvalidInputError(
                "the tokenizer's chat template cannot write these messages: "
                f"{reason[0] if reason else type(error).__name__}"
            ) from error
        return rendered

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the chat template writes tools, calls and results, all behind the chunks."""
        if self._place is None:
            return False
        asked: list[dict[str, Any]] = [{"role": "user", "content": "c"}]
        tools = ChatArguments((PROBE_TOOL,))
        try:
            described = self._split(asked, None, tools)[1]
            called = self._split([*asked, *PROBE_CALL], None, tools)[1]
        except InvalidInputError:  # it refuses, or writes tools before the chunks
            return False
        name, result = PROBE_TOOL["function"]["name"], PROBE_CALL[-1]["content"]
        return name in described and called.count(name) > described.count(name) and result in called

    def _pin_date(self) -> None:
        """Write a fixed date into a chat template that prints today's."""
        if self._place is None or "strftime_now" not in self._jinja():
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
        return _CLOCK.sub(lambda found: json.dumps(day.strftime(found["format"])), self._jinja())

    def _jinja(self) -> str:
        """The chat template, of a tokenizer that has several the one for chats."""
        return str(self.template.chat_template or self._tokenizer.get_chat_template())

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


def _covered_tools(arguments: ChatArguments | None, cover: Cover) -> ChatArguments | None:
    if arguments is None or not arguments.tools:
        return arguments
    tools = tuple(_covered_value([*arguments.tools], cover))
    return ChatArguments(tools, arguments.values)


def _covered(turns: Sequence[Mapping[str, Any]], cover: Cover) -> list[dict[str, Any]]:
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
