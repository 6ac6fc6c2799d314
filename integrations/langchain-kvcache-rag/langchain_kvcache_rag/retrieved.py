"""Texts that retrievers returned, to recognise documents in tools' results.

`create_retriever_tool` joins what it found to one text, unless it is asked for an artifact beside
it.  LangChain's callbacks tell what every retriever of the process gives.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

from kvcache_rag.integration import KnownTexts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.documents import Document

KNOWN: Final = KnownTexts()
"""Of every document that a retriever of this process gave.  What is stored, and found in the KV
store, is all the same that of the namespace of the engine that is asked."""


class _Watch(BaseCallbackHandler):
    """Sees what retrievers give, and nothing else."""

    run_inline = True
    ignore_llm = ignore_chat_model = ignore_chain = ignore_agent = ignore_retry = True
    ignore_custom_event = True

    def on_retriever_end(self, documents: Sequence[Document], **_: Any) -> None:
        for document in documents:
            KNOWN.note(document.page_content)


_WATCH: Final = _Watch()
_watching: Final[ContextVar[Any]] = ContextVar("kvcache_rag_retrieved", default=_WATCH)


@lru_cache(maxsize=1)
def watch() -> None:
    """Listen to the retrievers of this process from now on."""
    register_configure_hook(_watching, inheritable=False)


def documents_in(text: str) -> list[str]:
    """Texts of retrieved documents that stand in a text, whole and on lines of their own."""
    return [found.text for found in KNOWN.find(text)]
