"""One call of the chat model, ready for the engine: what is asked, over which chunks, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag import InvalidInputError
from langchain_kvcache_rag.messages import Asked, Conversation, Grounded

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from kvcache_rag import Answer, AnswerStream, Engine, StoredChunk
    from kvcache_rag.integration import References
    from langchain_kvcache_rag.chat_model import ChatKVCache

_FROM_MESSAGES: Final = ("chunks", "history", "prefix_mismatch", "cancelled")
_FOR_CHUNKS: Final = ("overflow", "policy", "scores")
_WHEN_SAMPLING: Final = ("top_k", "top_p")
# LangChain's names of what transformers calls otherwise.
_RENAMED: Final = {"max_tokens": "max_new_tokens", "timeout": "max_time"}
# What LangChain says to itself in the arguments of a call.
_INTERNAL: Final = ("ls_structured_output_format", "stream", "structured_output_format")


@dataclass(frozen=True, eq=False)
class Call:
    """A question for the engine.

    Attributes:
        engine: Answers.
        references: Where the texts' KV is, as far as it was noted.
        asked: What the messages ask.
        options: Keyword arguments of the engine's `generate` or `complete`.
    """

    engine: Engine
    references: References
    asked: Asked
    options: dict[str, Any]

    def run(self, cancelled: threading.Event | None = None) -> Answer:
        """Answer; stops at the next token once `cancelled` is set."""
        asked = self.asked
        if isinstance(asked, Conversation):
            return self.engine.complete(self._prompt(asked), cancelled=cancelled, **self.options)
        return self.engine.generate(
            asked.question,
            self.chunks(asked),
            history=asked.history(),
            prefix_mismatch=asked.prefix_mismatch,
            cancelled=cancelled,
            **self.options,
        )

    def open(self) -> AnswerStream:
        asked = self.asked
        if isinstance(asked, Conversation):
            return self.engine.stream_complete(self._prompt(asked), **self.options)
        return self.engine.stream(
            asked.question,
            self.chunks(asked),
            history=asked.history(),
            prefix_mismatch=asked.prefix_mismatch,
            **self.options,
        )

    def chunks(self, asked: Grounded) -> list[StoredChunk | str]:
        """The documents, each by reference if one is known that still holds, else by its text."""
        return [self.references.chunk(text, self.engine) for text in asked.texts]

    def _prompt(self, asked: Conversation) -> str:
        try:
            return self.engine.render_chat(asked.as_dicts())
        except InvalidInputError:
            plain = asked.in_two_roles()
            if plain == asked:
                raise
            return self.engine.render_chat(plain.as_dicts())


def call_options(
    llm: ChatKVCache, stop: Sequence[str] | str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of the model and arguments of a call, under the engine's names; the call wins.

    Raises:
        InvalidInputError: If an argument says what the messages say.
    """
    settings = {
        "temperature": llm.temperature,
        "max_tokens": llm.max_tokens,
        "timeout": llm.timeout,
        "top_p": llm.top_p,
        "top_k": llm.top_k,
        "stop": llm.stop,
        "policy": llm.policy,
        "overflow": llm.overflow,
    }
    options: dict[str, Any] = {}
    for one in (settings, llm.generate_kwargs, given, {"stop": stop}):
        for name, value in one.items():
            if name in _FROM_MESSAGES:
                raise InvalidInputError(f"{name} comes from the messages; leave it out")
            if value is not None and name not in _INTERNAL:
                options[_RENAMED.get(name, name)] = value
    sampling = options.get("do_sample", bool(options.get("temperature")))
    if not sampling and "generation_config" not in options:
        # Greedy search does not read them, and transformers says so each time.
        for name in _WHEN_SAMPLING:
            options.pop(name, None)
    return options


def for_asked(asked: Asked, options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that mean nothing to this question."""
    if isinstance(asked, Grounded):
        return options
    return {name: value for name, value in options.items() if name not in _FOR_CHUNKS}
