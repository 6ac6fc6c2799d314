"""Fit LlamaIndex's question templates to a prompt whose beginning is fixed.

The engine owns what stands before the chunks, because the chunks' caches were computed behind it.
A template is therefore rendered around two marks and cut: what it wants before the chunks is
compared, and if it is not what the engine has there, it begins the question; what it wants behind
them is the question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llama_index.core.prompts import BasePromptTemplate

    from kvcache_rag import Engine
    from llama_index.kvcache_rag.responses import Prompt
    from llama_index.kvcache_rag.settings import LLMSettings

_CONTEXT: Final = "@@kvcache-rag-context@@"
_QUERY: Final = "@@kvcache-rag-query@@"


class SplitPrompt(NamedTuple):
    """A rendered template, cut at the chunks.

    Attributes:
        before: Text before the chunks, without white space at its ends.
        behind: Text behind them, question included, likewise.
    """

    before: str
    behind: str

    def matches(self, engine: Engine) -> bool:
        """Whether the engine has this text before the chunks, white space at its ends aside."""
        own = {engine.prefix_text.strip(), engine.template.system.strip()}
        return self.before in own


@dataclass(frozen=True)
class Task:
    """One question on its way to the LLM.

    Attributes:
        query: The question, as it was asked.
        prompt: The whole prompt as text, for callbacks.
        request: What the LLM gets: question and chunks, or a plain text.
        template: The template it was written by.
    """

    query: str
    prompt: str
    request: Prompt
    template: BasePromptTemplate


def split_template(
    template: BasePromptTemplate, llm: LLMSettings, query: str, **variables: Any
) -> SplitPrompt | None:
    """Render a template and cut it at its context.

    Args:
        template: With `context_str`, and `query_str` behind it.
        llm: By which selectors choose.
        query: The question.
        variables: Further values of the template.

    Returns:
        None if no chunk can be reused: the context is missing, stands there twice or comes behind
        the question.
    """
    messages = template.format_messages(
        llm=llm, context_str=_CONTEXT, query_str=_QUERY, **variables
    )
    whole = "\n".join(message.content or "" for message in messages)
    before, found, behind = whole.partition(_CONTEXT)
    if not found or _QUERY in before or _CONTEXT in behind:
        return None
    return SplitPrompt(before.strip(), behind.replace(_QUERY, query).strip())


def plain_prompt(
    template: BasePromptTemplate,
    llm: LLMSettings,
    query: str,
    texts: Sequence[str],
    **variables: Any,
) -> str:
    """The whole prompt of a template, for templates that cannot be cut."""
    values = {"context_str": "\n\n".join(texts), "query_str": query, **variables}
    if llm.metadata.is_chat_model:
        return llm.chat_prompt(template.format_messages(llm=llm, **values))

    def write(cover: Callable[[str], str]) -> str:
        return template.format(
            llm=llm,
            messages_to_prompt=llm.messages_to_prompt,
            completion_to_prompt=llm.completion_to_prompt,
            **{name: cover(one) if isinstance(one, str) else one for name, one in values.items()},
        )

    return llm.engine.compose(write)


def written_prompt(engine: Engine, texts: Sequence[str], question: str) -> str:
    """What a stitched prompt says, for callbacks and traces."""
    chunks = "".join(engine.template.wrap(text) for text in texts)
    return f"{engine.prefix_text}{chunks}{engine.template.ask(question)}"


def own_template(engine: Engine) -> str:
    """The engine's prompt as a LlamaIndex template; LlamaIndex leaves other braces alone."""
    question = engine.template.question.replace("{question}", "{query_str}")
    return f"{engine.prefix_text}{{context_str}}\n{question}"
