"""Earlier messages of a chat, as written between the chunks and the question.

Every prompt is prefix, chunks, history and question in this order, because what comes before the
chunks has to be what their caches were computed behind.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import foreign_instructions, joined, said
from llama_index.kvcache_rag.options import turn
from llama_index.kvcache_rag.prompts import split_template

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.prompts import BasePromptTemplate

    from kvcache_rag import Engine
    from kvcache_rag.integration import Turn
    from llama_index.kvcache_rag.settings import LLMSettings

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


def spoken_turns(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Messages as turns, without those of tools: what was made of their output is answered."""
    turns = map(turn, messages)
    return [one for one in turns if one["role"] in ("system", "user", "assistant")]


@dataclass(frozen=True)
class Wording:
    """What is asked behind the chunks and the history.

    Attributes:
        question: The last user message, behind what nobody answered and what was instructed.
        history: The turns before it.
        mismatches: In which ways the caller wanted other text before the chunks.
    """

    question: str
    history: tuple[Turn, ...] = ()
    mismatches: tuple[str, ...] = ()

    @classmethod
    def from_query(cls, turns: Sequence[Turn], engine: Engine) -> Wording:
        """Leave the wording to the engine's template; the last turn is the user's, and asks.

        Where that turn is blank, the instructions are what is asked; without any the engine
        refuses.
        """
        foreign = foreign_instructions(turns, engine.prefix_text, engine.template.system)
        spoken = joined(one for one in turns if one["role"] != "system")
        is_asked = bool(spoken) and spoken[-1]["role"] == "user"
        unanswered = [spoken.pop()["content"]] if is_asked else []
        question = "\n\n".join([*foreign, *unanswered])
        return cls(question, tuple(spoken), (_OTHER_SYSTEM_MESSAGE,) if foreign else ())

    @classmethod
    def by(
        cls,
        template: BasePromptTemplate,
        query: str,
        turns: Sequence[Turn],
        llm: LLMSettings,
        **variables: Any,
    ) -> Wording | None:
        """Word a question by a template of LlamaIndex.

        Args:
            template: With `context_str`, and `query_str` behind it.
            query: As it was asked.
            turns: What was said before.
            llm: By which selectors choose.
            variables: Further values of the template.

        Returns:
            None if the template leaves no place for chunks.

        Raises:
            InvalidInputError: If it leaves none, and there is a history that has to stand behind
                them.
        """
        engine, split = llm.engine, split_template(template, llm, query, **variables)
        if split is None:
            if cls.from_query(turns, engine) == cls(""):
                return None
            raise InvalidInputError(
                "with a chat history or a system prompt, text_qa_template needs context_str once "
                "and query_str behind it"
            )
        if split.matches(engine):
            return cls.from_query([*turns, said("user", split.behind)], engine)
        asked = "\n\n".join(part for part in split if part.strip())
        own = cls.from_query([*turns, said("user", asked)], engine)
        return replace(own, mismatches=(*own.mismatches, _OTHER_TEMPLATE))

    @property
    def written(self) -> str:
        """History and question as text, for callbacks and traces."""
        spoken = "".join(f"{one['role']}: {one['content']}\n" for one in self.history)
        return f"{spoken}{self.question}"


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
