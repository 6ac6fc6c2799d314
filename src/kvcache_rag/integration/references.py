"""References from a row to the KV of its text.

A reference is five flat scalars in the metadata of a vector database's row.  The key of a chunk can
always be computed again from its text, so a lost or stale reference only costs time.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cachetools import LRUCache

from kvcache_rag.errors import FingerprintMismatchError, UnsupportedModelError
from kvcache_rag.forks import new_lock
from kvcache_rag.generation.question import StoredChunk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_rag.engine import Engine
    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.prompt.template import PromptTemplate


# Whatever wrote into a row: what no chunk of ours can be is no reference.
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_TOKENS, _BYTES = 2**31, 2**63

REFERENCE_KEYS: Final = ("kv_bytes", "kv_key", "kv_spec", "kv_text", "kv_tokens")
"""The metadata keys of a reference."""


@dataclass(frozen=True)
class Reference:
    """The KV of one row's text.

    Attributes:
        key: Content address of the chunk, 64 hexadecimal digits.
        spec: What the chunk's tensors depend on; another engine's spec means another chunk.
        tokens: Number of tokens of the chunk.
        nbytes: Size of its keys and values.
        text: Digest of the text that the chunk was computed from (`text_digest`).
    """

    key: str
    spec: str
    tokens: int
    nbytes: int
    text: str

    @classmethod
    def of(cls, key: ChunkKey, text: str, engine: Engine) -> Reference:
        """The reference of a chunk that `engine` computed from `text`."""
        digest = text_digest(text, engine)
        return cls(key.digest, key.spec, key.tokens, engine.nbytes(key), digest)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Reference | None:
        """The reference in a row's metadata; None if there is none or it is incomplete."""
        try:
            texts = [metadata[name] for name in ("kv_key", "kv_spec", "kv_text")]
            tokens, nbytes = int(metadata["kv_tokens"]), int(metadata["kv_bytes"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        are_digests = all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in texts)
        if not are_digests or not 0 < tokens < _TOKENS or not 0 <= nbytes < _BYTES:
            return None
        key, spec, text = texts
        return cls(key=key, spec=spec, tokens=tokens, nbytes=nbytes, text=text)

    def to_metadata(self) -> dict[str, str | int]:
        """Flat scalars for a row, each far below the size limits of hosted databases."""
        return {
            "kv_bytes": self.nbytes,
            "kv_key": self.key,
            "kv_spec": self.spec,
            "kv_text": self.text,
            "kv_tokens": self.tokens,
        }

    def resolve(self, engine: Engine) -> ChunkKey | None:
        """The chunk's key; None if another model, codec or prefix computed it."""
        try:
            return engine.reference(self.key, self.spec, self.tokens)
        except (FingerprintMismatchError, UnsupportedModelError):
            return None

    def chunk(self, text: str, engine: Engine) -> StoredChunk | str:
        """What to pass to `engine` for `text`: the text, with this reference where it helps.

        An outdated reference is marked as such, so that the miss can be explained.  A server gets
        only the text, by which it knows its chunks.
        """
        if is_remote(engine):
            return text
        if self.text != text_digest(text, engine):
            return StoredChunk(self._key(engine), text, "other text")
        key = self.resolve(engine)
        if key is None:
            return StoredChunk(self._key(engine), text, "other model")
        return StoredChunk(key, text)

    def _key(self, engine: Engine) -> ChunkKey:
        """The key as it is noted, whoever's it is."""
        from kvcache_rag.kv.chunk import ChunkKey  # loads torch

        return ChunkKey(self.key, self.spec, engine.namespace, self.tokens, 0)


class References:
    """References by text, for frameworks whose documents cannot carry them.

    Thread-safe; the least recently used are forgotten, which only costs time.
    """

    def __init__(self, limit: int = 65536) -> None:
        """Remember at most `limit` references (about half a kilobyte each)."""
        self._known: LRUCache[tuple[str, str], Reference] = LRUCache(limit)
        # The last one of each text, whatever its spec: it tells of a model that was changed.
        self._last: LRUCache[str, Reference] = LRUCache(limit)
        self._lock = new_lock()

    def note(self, reference: Reference) -> None:
        """Remember a reference, in place of an older one with the same text and spec."""
        with self._lock:
            self._known[reference.text, reference.spec] = reference
            self._last[reference.text] = reference

    def chunk(self, text: str, engine: Engine) -> StoredChunk | str:
        """What to pass to `engine` for `text`: a reference if one is known, else the text."""
        if is_remote(engine):
            return text
        try:
            # Not `engine.spec`, which looks at all weights, once per document: what refers to
            # weights of before is found out by the question itself.
            key = (text_digest(text, engine), engine._bound.capturing.spec)
        except UnsupportedModelError:
            return text  # it keeps no keys and values
        with self._lock:
            reference = self._known.get(key) or self._last.get(key[0])
        return text if reference is None else reference.chunk(text, engine)


def is_remote(engine: object) -> bool:
    """Whether an engine's chunks are on a server, under keys not known here."""
    return getattr(engine, "is_remote", False)


def text_digest(text: str, engine: Engine) -> str:
    """Digest by which a reference knows its text, as written in this engine's prompt.

    It includes the wrapper, because a chunk in another wrapper has other tokens, but not the
    prefix, which the engine's spec covers.  It also includes whether literals of control tokens are
    read as text: earlier versions read them as control tokens and noted the plain digest.
    """
    plain, as_text = wrapped_digests(text, engine.template)
    return as_text if engine._bound.renderer.has_control(text) else plain


def wrapped_digests(text: str, template: PromptTemplate) -> tuple[str, str]:
    """What `text_digest` may be by the template alone, where there is no engine.

    That of a text read as it is; that of one with literals of control tokens, read as text.
    """
    plain = hashlib.sha256(template.wrap(text).encode("utf-8", "surrogatepass"))
    return plain.hexdigest(), hashlib.sha256(plain.digest()).hexdigest()
