"""The names of everything that a store keeps, in every place.

    <namespace>/generation                        a number that grows when the namespace is deleted
    <namespace>/used  used                        bytes, for a limit of its own or on all of them
    <namespace>/quarantine/<time>-<digest>
    <namespace>/<spec>/spec.json                  for people: which model
    <namespace>/<spec>/<digest[:2]>/<digest>.safetensors
    .tmp-*                                        beside any of them: unfinished

A namespace is the first 32 digits of the SHA-256 of its text, a spec the first 16 of its digest.
What 0.1.0 left beside chunks (`<digest>.owner-<id>`, `.released-<id>`) counts as unfinished.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError, check_name

if TYPE_CHECKING:
    from kvcache_rag.kv.chunk import ChunkKey


SUFFIX = ".safetensors"

MANIFEST = "spec.json"

USED = "used"

CHUNK = re.compile(r"[0-9a-f]{16}/[0-9a-f]{2}/[0-9a-f]{64}\.safetensors")

UNFINISHED = re.compile(
    r"([0-9a-f]{16}/([0-9a-f]{2}/)?)?"
    r"(\.tmp[^/]*|[0-9a-f]{64}\.(owner|released)-[0-9a-f]{16})",
    re.DOTALL,
)
"""Both of the part of a name behind its namespace."""


def namespace_digest(namespace: str) -> str:
    """First part of the names of a namespace.

    Raises:
        InvalidInputError: If it is no text.
    """
    try:
        return hashlib.sha256(namespace.encode()).hexdigest()[:32]
    except (AttributeError, TypeError, UnicodeEncodeError):
        return namespace_digest(check_name("namespace", namespace))  # which raises


def spec_name(namespace: str, spec: str) -> str:
    """What the names of chunks of one model, dtype, codec and prefix begin with."""
    return f"{namespace_digest(namespace)}/{spec[:16]}"


def chunk_name(key: ChunkKey) -> str:
    """Name of a chunk's file; of digests only, whatever the key holds.

    Raises:
        InvalidInputError: If the key's digest or spec is not 64 hexadecimal digits.
    """
    digest = check_key(key).digest
    return f"{spec_name(key.namespace, key.spec)}/{digest[:2]}/{digest}{SUFFIX}"


def lock_name(key: ChunkKey) -> str:
    """Name of the lock under which a chunk is computed; 256 a namespace."""
    return f"{namespace_digest(key.namespace)}/locks/{check_key(key).digest[:2]}"


_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_key(key: ChunkKey) -> ChunkKey:
    """Return the key.

    Raises:
        InvalidInputError: If its digest or spec is not 64 lower-case hexadecimal digits, or its
            namespace no text.
    """
    if not isinstance(key.namespace, str) or not key.namespace.isascii():
        check_name("namespace", key.namespace)
    for part, value in (("digest", key.digest), ("spec", key.spec)):
        if not _DIGEST.fullmatch(value):
            raise InvalidInputError(
                f"the {part} of a ChunkKey is 64 hexadecimal digits, not {value[:80]!r}; "
                "make keys with chunk_key()"
            )
    return key
