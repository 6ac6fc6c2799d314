"""Earlier messages of a chat, as they stand between the chunks and the question.

Every prompt is prefix, chunks, history and question in this order, because what comes before the
chunks has to be what their caches were computed behind.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import foreign_instructions, joined
from llama_index.kvcache_rag.options import turn
from llama_index.kvcache_rag.prompts import split_template

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.prompts import BasePromptTemplate

    from kvcache_rag import Engine
    from llama_index.kvcache_rag.llm import KVCacheLLM

_OTHER_TEMPLATE: Final = (
    "text_qa_template has other text before the context than the engine, whose chunks were "
    "computed behind its own; it is written at the beginning of the question, behind the chunks "
    "(to have it before them, set it by KVCacheLLM(system_prompt=...))"
)
_OTHER_SYSTEM_MESSAGE: Final = (
    "a system message differs from the one that the engine's chunks were computed behind; it is "
    "written at the beginning of the question, behind the chunks "
    "(to have it before them, set it by KVCacheLLM(system_prompt=...))"
)


@dataclass(frozen=True)
class Conversation:
    """Earlier messages, in the engine's terms.

    Messages without text are left out, and so are those of tools: what an assistant made of a
    tool's output is in its answer.  Neighbours of one role are joined, because many chat templates
    refuse them.

    Attributes:
        turns: Of user and assistant, oldest first; the last one is the assistant's.
        instructions: System messages that are not the engine's own.
        unanswered: What the user said last, if nobody answered it.
    """

    turns: tuple[dict[str, str], ...] = ()
    instructions: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()

    @classmethod
    def of(cls, messages: Sequence[ChatMessage], engine: Engine) -> Conversation:
        """Sort messages by what becomes of them."""
        said = [turn(message) for message in messages]
        own = (engine.prefix_text, engine.template.system)
        turns = joined(one for one in said if one["role"] in ("user", "assistant"))
        unanswered: tuple[str, ...] = ()
        if turns and turns[-1]["role"] == "user":
            unanswered = (turns.pop()["content"],)
        return cls(tuple(turns), tuple(foreign_instructions(said, *own)), unanswered)

    def ask(self, question: str) -> str:
        """The question with everything that has to be said in the same breath."""
        return "\n\n".join([*self.instructions, *self.unanswered, question])

    def written(self, question: str) -> str:
        """History and question as text, for callbacks and traces."""
        spoken = "".join(f"{one['role']}: {one['content']}\n" for one in self.turns)
        return f"{spoken}{question}"


@dataclass(frozen=True)
class Wording:
    """What is asked behind the chunks and the history.

    Attributes:
        question: The last user message.
        mismatches: In which ways the caller wanted other text before the chunks.
    """

    question: str
    mismatches: tuple[str, ...]

    @classmethod
    def of(cls, query: str, spoken: Conversation) -> Wording:
        """Leave the wording to the engine's template."""
        mismatches = (_OTHER_SYSTEM_MESSAGE,) if spoken.instructions else ()
        return cls(spoken.ask(query), mismatches)

    @classmethod
    def by(
        cls,
        template: BasePromptTemplate,
        query: str,
        spoken: Conversation,
        llm: KVCacheLLM,
        **variables: Any,
    ) -> Wording | None:
        """Word a question by a template of LlamaIndex.

        Args:
            template: With `context_str`, and `query_str` behind it.
            query: As it was asked.
            spoken: What was said before.
            llm: By which selectors choose.
            variables: Further values of the template.

        Returns:
            None if the template leaves no place for chunks.

        Raises:
            InvalidInputError: If it leaves none, and there is a history that has to stand behind
                them.
        """
        split = split_template(template, llm, query, **variables)
        if split is None and spoken != Conversation():
            raise InvalidInputError(
                "with a chat history or a system prompt, text_qa_template needs context_str once "
                "and query_str behind it"
            )
        if split is None:
            return None
        if split.matches(llm.engine):
            return cls.of(split.behind, spoken)
        own = cls.of("\n\n".join(part for part in split if part.strip()), spoken)
        return cls(own.question, (*own.mismatches, _OTHER_TEMPLATE))


class Mismatches:
    """Counts prompts that wanted other text before the chunks, and warns once of each kind."""

    def __init__(self) -> None:
        self.count = 0
        self._warned: set[str] = set()

    def note(self, reasons: Sequence[str]) -> None:
        """Count a prompt, if it has reasons to be counted."""
        self.count += bool(reasons)
        for reason in reasons:
            if reason not in self._warned:
                self._warned.add(reason)
                warnings.warn(reason, stacklevel=2)

    def forget(self) -> None:
        self._warned.clear()
