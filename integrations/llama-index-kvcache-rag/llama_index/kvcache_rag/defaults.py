"""Which LLM answers when a caller names none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_index.core.settings import Settings

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag.llm import KVCacheLLM

if TYPE_CHECKING:
    from llama_index.core.llms.llm import LLM


def kv_llm(llm: LLM | None) -> KVCacheLLM:
    """The LLM given, or that of LlamaIndex's settings, if it can reuse chunks.

    Raises:
        InvalidInputError: If it is no `KVCacheLLM`.
    """
    try:
        found = llm or Settings.llm
    except ImportError as error:  # nothing was set, and LlamaIndex's default is not installed
        raise InvalidInputError("give llm=KVCacheLLM(...), or set Settings.llm to one") from error
    if not isinstance(found, KVCacheLLM):
        raise InvalidInputError(
            f"cached chunks need a KVCacheLLM, not a {type(found).__name__}; give llm="
        )
    return found
