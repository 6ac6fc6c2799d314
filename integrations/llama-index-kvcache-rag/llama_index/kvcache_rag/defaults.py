"""Which LLM answers when a caller names none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.settings import Settings

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag.llm import KVCacheLLM

if TYPE_CHECKING:
    from llama_index.core.bridge.pydantic import BaseModel
    from llama_index.core.llms.llm import LLM


def kv_llm(llm: LLM | None) -> KVCacheLLM:
    """The LLM given, or that of LlamaIndex's settings, if it can reuse chunks.

    Raises:
        InvalidInputError: If it is no `KVCacheLLM`.
    """
    return _reusing(_chosen(llm))


def kv_llm_with_class(llm: LLM | None) -> tuple[KVCacheLLM, type[BaseModel] | None]:
    """`kv_llm`, and the class that its `as_structured_llm` was told; None without."""
    found = _chosen(llm)
    if isinstance(found, StructuredLLM):
        return _reusing(found.llm), found.output_cls
    return _reusing(found), None


def _chosen(llm: LLM | None) -> LLM:
    try:
        return llm or Settings.llm
    except ImportError as error:  # nothing was set, and LlamaIndex's default is not installed
        raise InvalidInputError("give llm=KVCacheLLM(...), or set Settings.llm to one") from error


def _reusing(found: LLM) -> KVCacheLLM:
    if not isinstance(found, KVCacheLLM):
        raise InvalidInputError(
            f"cached chunks need a KVCacheLLM, not a {type(found).__name__}; give llm="
        )
    return found
