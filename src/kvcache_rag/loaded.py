"""A chunk of a prompt, and what bringing a prompt's context into a buffer gave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_rag.chunk import ChunkKey
    from kvcache_rag.models.arrival import Loading


@dataclass(frozen=True)
class ContextChunk:
    """A chunk of a prompt.

    Attributes:
        key: Its address.
        ids: Its token ids; None when it is loaded by reference, without tokenising.
        text: Its text, for a reference that has gone meanwhile; None when only the key is known.
        is_joint: Whether it is several chunks computed together (`combination`).
    """

    key: ChunkKey
    ids: tuple[int, ...] | None
    text: str | None = None
    is_joint: bool = False

    def __len__(self) -> int:
        """Number of tokens."""
        return self.key.tokens if self.ids is None else len(self.ids)


@dataclass(frozen=True)
class LoadedContext:
    """One row of a buffer, filled and stitched.

    Attributes:
        ids: Ids of prefix and chunks.
        load: Seconds for reading and computing.
        stitch: Seconds for turning keys.
        hits: Chunks found, per tier.
        misses: Chunks computed.
        reused_tokens: Tokens of the chunks found.
        prefilled_tokens: Tokens of the chunks computed, missing or declined.
        declined: Chunks that were cached and computed all the same, per reason.
        ahead: Brings what is not there yet; whoever asked for that closes it.  None when everything
            lies in its place.
    """

    ids: tuple[int, ...]
    load: float
    stitch: float
    hits: Mapping[str, int]
    misses: int
    reused_tokens: int
    prefilled_tokens: int
    declined: Mapping[str, int] = field(default_factory=dict)
    ahead: Loading | None = None
