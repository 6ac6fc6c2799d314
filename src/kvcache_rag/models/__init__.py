"""Models: what is measured about them, and the transformers adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_rag.models.weight_formats import WeightFormat as WeightFormat
    from kvcache_rag.models.weight_formats import pack_weights as pack_weights
    from kvcache_rag.models.weight_formats import unpack_weights as unpack_weights
else:
    from kvcache_rag.exports import lazy_names

    __getattr__, __dir__ = lazy_names(__name__)
