"""What every framework's integration needs: rows of a Chroma collection with references to KV.

A vector database holds rows; the chunk store holds their keys and values.  This package keeps the
two in step and knows no framework: texts and metadata come in, references come out.
"""

from kvcache_rag.integration.opening import open_engine
from kvcache_rag.integration.prefilling import RowPrefiller
from kvcache_rag.integration.reference import (
    REFERENCE_KEYS,
    Reference,
    References,
    text_digest,
)
from kvcache_rag.integration.rows import NewRow, Row, Rows, Scalar, Where, flat

__all__ = [
    "REFERENCE_KEYS",
    "NewRow",
    "Reference",
    "References",
    "Row",
    "RowPrefiller",
    "Rows",
    "Scalar",
    "Where",
    "flat",
    "open_engine",
    "text_digest",
]
