"""What becomes of every token of a prompt: reused or computed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from kvcache_rag.mask import PositionScheme
    from kvcache_rag.stitch import SpanKind

TokenState: TypeAlias = Literal["reused", "prefilled", "recomputed", "computed"]
"""`reused`: keys and values are cached; `prefilled`: of a chunk that is computed by itself first,
because it is not cached or loading it would take longer; `recomputed`: computed again in the
context of the whole prompt; `computed`: the query, and everything in a full prefill."""


@dataclass(frozen=True)
class ExplainedToken:
    """One token of a prompt.

    Attributes:
        id: In the vocabulary.
        text: What it adds to the prompt's text; "" where several tokens write one character, for
            all but the last of them, and for a token that stands for no text.
        position: At which its keys stand when the model answers.
        state: What becomes of it.
    """

    id: int
    text: str
    position: int
    state: TokenState


@dataclass(frozen=True)
class ExplainedSpan:
    """A run of tokens of a prompt, half-open.

    Attributes:
        kind: What the tokens are.
        start: First token.
        stop: One behind the last token.
        tier: Of the store, from which a chunk would be loaded; "" for one that is not cached (or
            would not be loaded), in a full prefill, and for prefix and query.
    """

    kind: SpanKind
    start: int
    stop: int
    tier: str = ""


@dataclass(frozen=True)
class Explained:
    """A prompt, token by token.  The counts are those of `Metrics`.

    Attributes:
        tokens: Of the whole prompt; their texts joined are its text.
        spans: Prefix (may be empty), chunks in prompt order, query.
        policy: The policy that answers, as it can be pasted back.
        positions: Where the chunks stand.
        gate: Why the engine's gate lets `FullRecompute()` answer instead, or "".
        prefix_tokens: Tokens of the shared prefix.
        reused_tokens: Chunk tokens whose keys and values come from the store.
        recomputed_tokens: Context tokens that the policy computes again.
        prefilled_tokens: Chunk tokens that are not cached, or that it would take longer to load.
        query_tokens: Tokens of history, question and everything behind the chunks.
    """

    tokens: tuple[ExplainedToken, ...]
    spans: tuple[ExplainedSpan, ...]
    policy: str
    positions: PositionScheme
    gate: str
    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    prefilled_tokens: int
    query_tokens: int

    @property
    def text(self) -> str:
        """The prompt's text."""
        return "".join(token.text for token in self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
