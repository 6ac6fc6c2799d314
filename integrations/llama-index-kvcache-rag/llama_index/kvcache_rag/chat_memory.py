"""The default memory of a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.memory import ChatMemoryBuffer

from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.integration import is_remote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llama_index.core.base.llms.types import ChatMessage

    from llama_index.kvcache_rag.llm import KVCacheLLM


def new_memory(
    llm: KVCacheLLM, chat_history: Sequence[ChatMessage] | None, generate_kwargs: Mapping[str, Any]
) -> ChatMemoryBuffer:
    """A memory that counts in the model's own tokens and leaves room for chunks and answer.

    Args:
        llm: Its model is loaded.
        chat_history: What was said before.
        generate_kwargs: Of the synthesizer; its `max_new_tokens` counts.

    Raises:
        ContextTooLongError: If instruction and answer leave no room.
    """
    engine = llm.engine
    options = {"max_new_tokens": llm.max_new_tokens, **llm.generate_kwargs, **generate_kwargs}
    is_far = is_remote(engine)
    prefix = 0 if is_far else len(engine.tokenize("?").prefix)
    room = llm.metadata.context_window - prefix - options["max_new_tokens"]
    if room < 2:
        raise ContextTooLongError(
            f"instruction and max_new_tokens leave {max(room, 0)} tokens of the context window for "
            "chunks and history; lower max_new_tokens"
        )
    # Not LlamaIndex's `Memory`, which keeps a database connection open for good, counts on the
    # event loop, and forgets nothing of a history that it is given.
    return ChatMemoryBuffer.from_defaults(
        chat_history=list(chat_history or ()),
        token_limit=room // 2,
        # Of a model elsewhere nobody can tell them: LlamaIndex's own tokenizer counts then.
        tokenizer_fn=None if is_far else lambda text: list(engine.brought_ids(text)),
    )
