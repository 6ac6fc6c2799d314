"""What every framework's integration needs: rows of a Chroma collection with references to KV.

A vector database holds rows; the chunk store holds their keys and values.  This package keeps the
two in step and knows no framework: texts and metadata come in, references come out.  Names are
loaded when they are first used, so that only what runs a model loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_rag.errors import refuse_unknown as refuse_unknown
    from kvcache_rag.integration.embedding import hash_vector as hash_vector
    from kvcache_rag.integration.engine import open_engine as open_engine
    from kvcache_rag.integration.prefiller import RowPrefiller as RowPrefiller
    from kvcache_rag.integration.references import REFERENCE_KEYS as REFERENCE_KEYS
    from kvcache_rag.integration.references import Reference as Reference
    from kvcache_rag.integration.references import References as References
    from kvcache_rag.integration.references import text_digest as text_digest
    from kvcache_rag.integration.rows import NewRow as NewRow
    from kvcache_rag.integration.rows import Row as Row
    from kvcache_rag.integration.rows import Rows as Rows
    from kvcache_rag.integration.rows import Scalar as Scalar
    from kvcache_rag.integration.rows import Where as Where
    from kvcache_rag.integration.rows import flat as flat
    from kvcache_rag.models.adapters import lasting_adapter as lasting_adapter
else:
    from kvcache_rag.exports import lazy_names

    __getattr__, __dir__ = lazy_names(__name__)
