"""From text to tokens: how a prompt is written, token ids, and scores of tokens and chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_rag.prompt.renderer import PromptIds as PromptIds
    from kvcache_rag.prompt.template import Message as Message
    from kvcache_rag.prompt.template import PromptTemplate as PromptTemplate
else:
    from kvcache_rag.exports import lazy_names

    __getattr__, __dir__ = lazy_names(__name__)
