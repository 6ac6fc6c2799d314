"""How a prompt is written: shared prefix, wrapped chunks, then history and question.

The order is fixed, because everything before a chunk is part of that chunk's cache: prefix
(instruction), chunks, history and question.  With a chat template the chunks are at the end of the
system message; templates without a system role get them in the first user message.  Prefix, each
chunk and the query are tokenised separately, so that the cached and the plain path use the same
ids.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from kvcache_rag.errors import (
    InvalidInputError,
    NamedArguments,
    check_list,
    check_name,
    check_settings,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


FILE_NAME = "prompt_template.json"

TEXT_FIELDS = ("system", "chunk_start", "chunk_end", "question", "refine")
"""The fields of `PromptTemplate` that its file holds."""

DEFAULT_SYSTEM = (
    "Answer the question using only the documents below. "
    "If they do not contain the answer, say that you do not know.\n\n"
)

DEFAULT_DATE = datetime.date(2024, 7, 26)

_TAG: Final = re.compile(r"<[^<>\s][^<>]*>")

# Arguments of `apply_chat_template` that are no variables of a template.
_NO_VALUES: Final = frozenset(
    ("add_generation_prompt", "chat_template", "conversation", "messages", "tokenize", "tools")
)

# Who may speak in a history, and what their turns have beside a content.
_SPEAKERS: Final[dict[Any, tuple[str, ...]]] = {
    "user": (),
    "assistant": ("tool_calls",),
    "tool": ("name", "tool_call_id"),
}

SpecialTokens: TypeAlias = Literal["text", "allow"]
"""How literals of a tokenizer's added tokens are read in texts of users and documents."""


@dataclass(frozen=True)
class Message(NamedArguments):
    """One turn of a conversation.

    Attributes:
        role: "user" or "assistant".
        content: What was said.
    """

    role: str
    content: str


@dataclass(frozen=True)
class PromptTemplate(NamedArguments):
    """The parts of a prompt that are the same for every question.

    Attributes:
        system: Instruction before the chunks; part of every chunk's cache.
        chunk_start: Written before each chunk's text.
        chunk_end: Written after it.
        question: Form of the question, with `{question}`.
        refine: Form of a later round of `overflow="refine"`, with `{question}` and `{answer}`.
        template_date: Date for chat templates that print one; None for `DEFAULT_DATE`.
        chat_template_kwargs: Further values for the chat template, such as `{"enable_thinking":
            False}`.
        special_tokens: How a literal such as `<|im_end|>` in a document, question or history is
            read: as "text", or with "allow" as the tokenizer's control token (only if every text
            can be trusted).
        chat_template: Jinja chat template; None for the tokenizer's.
    """

    system: str = DEFAULT_SYSTEM
    chunk_start: str = "Document: "
    chunk_end: str = "\n\n"
    question: str = "{question}"
    refine: str = (
        "{question}\n\nAn answer found in other documents is: {answer}\n"
        "Improve it if the documents above help, else repeat it."
    )
    template_date: datetime.date | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: SpecialTokens = "text"
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if self.special_tokens not in get_args(SpecialTokens):
            raise InvalidInputError(
                'PromptTemplate.special_tokens must be "text" or "allow", not '
                f"{self.special_tokens!r}"
            )
        check_settings(PromptTemplate, vars(self))
        for name in TEXT_FIELDS:
            check_name(f"text of PromptTemplate.{name}", getattr(self, name))
        for name, needed in (("question", ("{question}",)), ("refine", ("{question}", "{answer}"))):
            missing = [field_ for field_ in needed if field_ not in getattr(self, name)]
            if missing:
                raise InvalidInputError(
                    f"PromptTemplate.{name} must contain {' and '.join(missing)}"
                )

    @classmethod
    def load(cls, folder: Path) -> PromptTemplate | None:
        """The template that comes with a model (`prompt_template.json` in its folder), or None.

        Raises:
            InvalidInputError: If the file is not a JSON object of this class's text fields.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidInputError(f"{path} is not JSON: {error}") from error
        texts = isinstance(values, dict) and all(isinstance(v, str) for v in values.values())
        if not texts or not set(values) <= set(TEXT_FIELDS):
            raise InvalidInputError(
                f"{path} may only hold the text fields {', '.join(sorted(TEXT_FIELDS))}"
            )
        return cls(**values)

    def wrap(self, text: str) -> str:
        """A chunk as written in the prompt."""
        return f"{self.chunk_start}{text}{self.chunk_end}"

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags and labels that end an answer, because a document would follow them.

        A tag such as `<doc>` ends it anywhere, a label such as `Document:` at the start of a line.
        """
        texts = (self.chunk_start, self.chunk_end)
        labels = [text.strip() for text in texts if text.rstrip().endswith(":")]
        tags = [tag for text in texts for tag in _TAG.findall(text)]
        return (*dict.fromkeys(tags), *(f"\n{label}" for label in labels))

    def ask(self, question: str) -> str:
        """The question as written in the last user message."""
        return self.question.replace("{question}", question)

    def ask_again(self, question: str, answer: str) -> str:
        """The question of a later round, with the answer found so far."""
        parts = {"{question}": self.ask(question), "{answer}": answer}
        return re.sub(r"\{question\}|\{answer\}", lambda found: parts[found.group()], self.refine)


@dataclass(frozen=True)
class ChatArguments:
    """What the chat template gets besides the messages, for one question.

    Attributes:
        tools: Tools that the answer may call, each `{"type": "function", "function": {...}}`.
        values: Values of the template's variables, such as `{"enable_thinking": False}`; they
            override `PromptTemplate.chat_template_kwargs`.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_options(
        cls,
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any] | None,
    ) -> ChatArguments | None:
        """Checked arguments; None if both are empty.

        Raises:
            InvalidInputError: If a tool does not describe a function, or `values` is not a dict of
                the template's own variables.
        """
        tools = check_list("tools", tools, "descriptions of functions")
        if not tools and not values:
            return None
        for index, tool in enumerate(tools):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise InvalidInputError(
                    f"tools[{index}] must be the description of a function, {{'type': 'function', "
                    "'function': {'name': ..., 'parameters': ...}}"
                )
        if not isinstance(values or {}, Mapping):
            raise InvalidInputError(
                f"chat_template_kwargs must be a dict such as {{'enable_thinking': False}}, not "
                f"{values!r}"
            )
        taken = sorted(_NO_VALUES & {*(values or {})})
        if taken:
            raise InvalidInputError(
                f"chat_template_kwargs are values of the chat template's own variables; leave out "
                f"{', '.join(taken)}"
            )
        return cls(tuple(tools), dict(values or {}))

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `apply_chat_template`."""
        return {**self.values, **({"tools": [*map(dict, self.tools)]} if self.tools else {})}


def text_fields(template: PromptTemplate) -> dict[str, str]:
    """What the file of a template holds, as `PromptTemplate.load` reads it."""
    return {name: getattr(template, name) for name in TEXT_FIELDS}


def as_messages(history: Sequence[Message | Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Earlier turns as plain dictionaries, as chat templates read them.

    An assistant's turn may have `tool_calls`, and a tool's turn `name` and `tool_call_id`.

    Raises:
        InvalidInputError: If a turn has no role and content, or is a system message (which belongs
            in the template).
    """
    turns = []
    for index, turn in enumerate(check_list("history", history, "messages")):
        plain = asdict(turn) if isinstance(turn, Message) else turn
        role = plain.get("role") if isinstance(plain, Mapping) else None
        content = plain.get("content") if isinstance(plain, Mapping) else None
        if not isinstance(role, str) or role not in _SPEAKERS or not isinstance(content, str):
            raise InvalidInputError(
                f"history[{index}] must have the role user, assistant or tool and a text content; "
                "an instruction belongs into PromptTemplate(system=...)"
            )
        read = {"role": role, "content": content}
        for name in _SPEAKERS[role]:
            if plain.get(name):
                read[name] = plain[name]
        turns.append(read)
    return turns
