"""What every framework's integration needs: rows of a Chroma collection with references to KV.

A vector database holds rows; the chunk store holds their keys and values.  This package keeps the
two in step and knows no framework: texts and metadata come in, references come out.  Names are
loaded when they are first used, so that only what runs a model loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache_rag.integration.embedding import hash_vector
    from kvcache_rag.integration.engine import open_engine
    from kvcache_rag.integration.prefiller import RowPrefiller
    from kvcache_rag.integration.references import (
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
    "hash_vector",
    "open_engine",
    "text_digest",
]

_HOMES = {
    "embedding": ("hash_vector",),
    "engine": ("open_engine",),
    "prefiller": ("RowPrefiller",),
    "references": ("REFERENCE_KEYS", "Reference", "References", "text_digest"),
    "rows": ("NewRow", "Row", "Rows", "Scalar", "Where", "flat"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return list(__all__)
