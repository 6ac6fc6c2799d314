"""Where a row says that its text's KV is kept, and how a node carries that to the answering side.

The reference is extra metadata of the *row*: five flat scalars, never part of the user's node,
because anything in `node.metadata` would change the node's hash (a docstore would ingest it again)
and leak into prompts.  A node read back carries a copy under keys that are excluded from LLM and
embedding text.  The key of a chunk can always be computed again, so a lost or stale reference is
only slower.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from llama_index.core.schema import BaseNode, MetadataMode

from kvcache_rag import FingerprintMismatchError, StoredChunk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag import ChunkKey, Engine

REFERENCE_KEYS: Final = ("kv_bytes", "kv_key", "kv_spec", "kv_text", "kv_tokens")


@dataclass(frozen=True)
class Reference:
    """The KV of one row's text.

    Attributes:
        key: Content address of the chunk, 64 hexadecimal digits.
        spec: What the chunk's tensors depend on; another engine's spec means another chunk.
        tokens: Number of tokens of the chunk.
        nbytes: Size of its keys and values.
        text: Digest of the text that the chunk was computed from, wrapper included.
    """

    key: str
    spec: str
    tokens: int
    nbytes: int
    text: str

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Reference | None:
        """The reference in a row or a returned node; None if there is none, or not a whole one."""
        try:
            return cls(
                key=str(metadata["kv_key"]),
                spec=str(metadata["kv_spec"]),
                tokens=int(metadata["kv_tokens"]),
                nbytes=int(metadata["kv_bytes"]),
                text=str(metadata["kv_text"]),
            )
        except (KeyError, TypeError, ValueError):
            return None

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
        """The chunk's address; None if another model, codec or prefix computed it."""
        try:
            return engine.reference(self.key, self.spec, self.tokens)
        except FingerprintMismatchError:
            return None


def llm_text(node: BaseNode) -> str:
    """The text that stands in the prompt for this node, at ingestion and at answering alike."""
    return node.get_content(metadata_mode=MetadataMode.LLM)


def text_digest(text: str, engine: Engine) -> str:
    """Digest by which a reference knows its text, as it stands in this engine's prompt.

    The wrapper is part of it, because a chunk in another wrapper has other tokens; the prefix is
    not, because the engine's spec covers it.
    """
    written = engine.template.wrap(text)
    return hashlib.sha256(written.encode("utf-8", "surrogatepass")).hexdigest()


def attach(node: BaseNode, reference: Reference) -> None:
    """Put the reference on a node read from a row, out of sight of LLM and embedding texts."""
    node.metadata.update(reference.to_metadata())
    for excluded in (node.excluded_llm_metadata_keys, node.excluded_embed_metadata_keys):
        excluded.extend(key for key in REFERENCE_KEYS if key not in excluded)


def without_reference(node: BaseNode) -> BaseNode:
    """The node as its user made it: itself, or a copy if it carries a reference from a row."""
    if not any(key in node.metadata for key in REFERENCE_KEYS):
        return node
    return node.model_copy(
        update={
            "metadata": _without(node.metadata),
            "excluded_llm_metadata_keys": _others(node.excluded_llm_metadata_keys),
            "excluded_embed_metadata_keys": _others(node.excluded_embed_metadata_keys),
        }
    )


def chunks_of(
    nodes: Sequence[BaseNode], texts: Sequence[str], engine: Engine
) -> list[StoredChunk | str]:
    """What to hand to the engine: each chunk by reference if that still holds, else by its text.

    Args:
        nodes: Retrieved nodes, none if there are only texts.
        texts: Their LLM texts now; postprocessors may have changed them since they were stored.
        engine: The engine that will answer.

    Returns:
        Without those that have no text (an image), which have nothing to say here.
    """
    chunks: list[StoredChunk | str] = list(texts)
    if nodes:
        chunks = [_chunk(node, text, engine) for node, text in zip(nodes, texts, strict=True)]
    return [chunk for chunk, text in zip(chunks, texts, strict=True) if text.strip()]


def _chunk(node: BaseNode, text: str, engine: Engine) -> StoredChunk | str:
    reference = Reference.from_metadata(node.metadata)
    if reference is None or reference.text != text_digest(text, engine):
        return text
    key = reference.resolve(engine)
    return text if key is None else StoredChunk(key, text)


def _without(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key not in REFERENCE_KEYS}


def _others(keys: list[str]) -> list[str]:
    return [key for key in keys if key not in REFERENCE_KEYS]
