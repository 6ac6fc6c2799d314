"""What the tests of the chat model share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage

from langchain_kvcache_rag.blocks import document_block

if TYPE_CHECKING:
    from collections.abc import Iterable

LONG = {"max_tokens": 400, "min_new_tokens": 400}
"""Keywords of a call whose answer is long."""


def over(question: str, *texts: str) -> list[HumanMessage]:
    """A question over documents."""
    blocks: list[Any] = [document_block(Document(text)) for text in texts]
    return [HumanMessage([*blocks, {"type": "text", "text": question}])]


def joined(chunks: Iterable[Any]) -> AIMessageChunk:
    """The message that chunks of a stream add up to."""
    first, *others = chunks
    for chunk in others:
        first = first + chunk
    whole: AIMessageChunk = first
    return whole


def details(message: AIMessage) -> dict[str, int]:
    """Which of the prompt's tokens were read from the cache, and which went into it."""
    assert message.usage_metadata is not None
    found: Any = message.usage_metadata["input_token_details"]
    return dict(found)


class Steps:
    """A logits processor that counts the model's steps, and slows them down."""

    def __init__(self, pause: float = 0.003) -> None:
        self.count = 0
        self._pause = pause

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.count += 1
        time.sleep(self._pause)
        return scores


class Recorder(BaseCallbackHandler):
    """Remembers what LangChain reports of chat models."""

    def __init__(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        self.ends: list[Any] = []
        self.errors: list[BaseException] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.starts.append(kwargs)

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ends.append(response)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)
