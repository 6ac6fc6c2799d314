"""Everything this package raises for a user's situation.

    KVCacheRagError
    ├── UnsupportedModelError     the model's cache cannot be captured or moved: layer and reason
    ├── ChunkNotFoundError        the store does not hold the key: a miss, never a failed question
    │   ├── CorruptChunkError     it held something else, which was put aside
    │   └── UntrustedChunkError   it holds what the signing key did not sign, which is left alone
    ├── FingerprintMismatchError  a key belongs to another model, prefix or namespace
    ├── ContextTooLongError       a chunk or a prompt does not fit the context window
    ├── InvalidInputError         an argument cannot be used (also a ValueError)
    └── MissingExtraError         an optional dependency is missing: carries the install line

Each message is one sentence that says what was wrong and what to do about it.
"""

from __future__ import annotations


class KVCacheRagError(Exception):
    """Root of every error that this package raises on purpose."""


class UnsupportedModelError(KVCacheRagError):
    """The model keeps its context in a way that cannot be captured or moved."""


class ChunkNotFoundError(KVCacheRagError):
    """The store does not hold this chunk."""


class CorruptChunkError(ChunkNotFoundError):
    """The stored bytes are not those of the chunk asked for; they were put aside."""


class UntrustedChunkError(ChunkNotFoundError):
    """The stored file is not signed by the key of this store; it was left as it is."""


class FingerprintMismatchError(KVCacheRagError):
    """The key was made by another model, prefix, codec or namespace."""


class ContextTooLongError(KVCacheRagError):
    """More tokens than the model's context window holds."""


class InvalidInputError(KVCacheRagError, ValueError):
    """An argument that cannot be used."""


class MissingExtraError(KVCacheRagError, ImportError):
    """An optional dependency is missing."""

    def __init__(self, package: str, extra: str, dist: str = "kvcache-rag") -> None:
        """Say which package is missing, and which extra of which distribution installs it."""
        super().__init__(f"{package} is not installed: pip install '{dist}[{extra}]'")
