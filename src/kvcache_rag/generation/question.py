"""A question as it is asked.  Nothing here loads torch, because clients of a server have none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvcache_rag.metrics import Relevance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.metrics import Miss
    from kvcache_rag.policies.relevance import Numbers


@dataclass(frozen=True)
class StoredChunk:
    """A chunk given by reference, with its text in case the reference is not valid.

    Attributes:
        key: Its address, from `Engine.add` or `Engine.reference`.
        text: Its text.
        outdated: Why the key does not fit the text or engine; then only the text counts and a miss
            has this reason. "" if it may fit.
    """

    key: ChunkKey
    text: str
    outdated: Literal["", "other text", "other model"] = ""


ChunkInput: TypeAlias = "str | ChunkKey | StoredChunk"
"""How a caller may name a chunk."""


@dataclass(frozen=True)
class ReadingReport:
    """What the model said of chunks before choosing which to answer from.

    Attributes:
        likelihoods: Of the question after contexts of chunks, by their numbers, in nats; None for
            one that would have cost too much.
        chunks: How many chunks were read alone.
        tokens: Tokens computed for it, without missing chunks.
        seconds: Time taken.
        missed: Chunks that had to be computed for it, and why.
    """

    likelihoods: Mapping[Numbers, float | None] = field(default_factory=dict)
    chunks: int = 0
    tokens: int = 0
    seconds: float = 0.0
    missed: tuple[Miss, ...] = ()

    @property
    def relevance(self) -> tuple[Relevance, ...]:
        """What was found of single chunks, in their order."""
        without = self.likelihoods.get(())
        return tuple(
            Relevance(context[0], said - without)
            for context, said in sorted(self.likelihoods.items())
            if len(context) == 1 and said is not None and without is not None
        )

    def is_below(self, nats: float, chunks: int) -> bool:
        """Whether all chunks were read, and none makes the question so much likelier."""
        found = self.relevance
        return 0 < chunks == len(found) and all(one.nats < nats for one in found)


@dataclass(frozen=True)
class Question:
    """What a caller asks.

    Attributes:
        text: A question, or a text that is continued as it is.
        chunks: What it is answered from, best first.
        options: Further arguments of `RequestBuilder.request`, or of `RequestBuilder.completion`.
        is_completion: Whether the text is continued.
        read: What the model said of the chunks, as far as a policy wanted to know.
    """

    text: str
    chunks: Sequence[ChunkInput] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    is_completion: bool = False
    read: ReadingReport = field(default_factory=ReadingReport)

    def by_text(self) -> Question:
        """The same, with no reference that says how long a chunk is whose text is known."""
        chunks = [
            replace(chunk, outdated="other text") if isinstance(chunk, StoredChunk) else chunk
            for chunk in self.chunks
        ]
        return replace(self, chunks=chunks)
