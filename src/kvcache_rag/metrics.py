"""What an answer cost, why chunks were not cached, and the answer itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from kvcache_rag.errors import InvalidInputError

MissReason: TypeAlias = Literal[
    "not prefilled", "evicted", "damaged", "not signed", "unreadable", "other model", "other text"
]
"""Why a chunk had to be computed.  `not prefilled`: as far as is known, it never was.  `evicted`:
it was stored, but dropped by a limit, a release, a deletion or its `ttl`.  `damaged`: its file was
not as expected and was put aside.  `not signed`: its file lacks the signature of the store's key.
`unreadable`: the store could not be asked, or may not read the file.  `other model`: its reference
is for another model, adapter, dtype, codec, instruction or tenant.  `other text`: its reference is
for another text."""


@dataclass(frozen=True)
class Miss:
    """A chunk that was not cached.

    Attributes:
        chunk: Its number among those given, from 0; for several computed together, that of the
            first.
        tokens: Its length.
        reason: Why it was not cached.
    """

    chunk: int
    tokens: int
    reason: MissReason


@dataclass(frozen=True)
class Relevance:
    """How likely a question is after a chunk.

    Attributes:
        chunk: Its number among those given.
        nats: How much likelier the chunk makes the question than no chunk; negative if less likely.
    """

    chunk: int
    nats: float


@dataclass(frozen=True)
class Metrics:
    """Cost of one answer.  Times are in seconds; other numbers are counts.

    Attributes:
        ttft: From the call to the first generated token.
        load: Part of `ttft`: reading cached chunks, and prefilling and storing missing ones.
        stitch: Part of `ttft`: rotating keys to their places.
        choose: Part of `ttft`: choosing context tokens, with the signals this needs.  An auxiliary
            model works while chunks load, so only its extra seconds count.
        recompute: Part of `ttft`: computing the chosen tokens again, in one pass with all of the
            query but its last token.
        prefill: Part of `ttft`: the forward pass over the rest of the query (over everything, for a
            full prefill).
        total: From the call to the last token.
        prefix_tokens: Tokens of the shared prefix.
        reused_tokens: Chunk tokens whose keys and values came from the store.
        recomputed_tokens: Context tokens that a policy computed again.
        fresh_tokens: Chunk tokens computed together with the query, in the context of the others
            (`BestFew`, `BestLast`); neither loaded nor stored.
        prefilled_tokens: Chunk tokens computed for this answer because they were not cached.
        query_tokens: Tokens of history, question and everything else after the chunks.
        generated_tokens: Tokens of the answer.
        hits: Chunks found, per tier.
        misses: Chunks that were not cached (they are now, if the store could keep them).
        missed: These chunks with the reasons, in prompt order.
        auxiliary_misses: Chunks that an auxiliary model had not cached when it scored them; they
            are cached now.
        references: Chunks given by a valid reference, whose text was not tokenised.
        dropped_chunks: Chunks left out because the prompt would not fit.
        unused_chunks: Chunks left out because the policy answers from better ones (`BestFew`).
        reading: Part of `ttft`: reading the question after chunks, to choose among them.
        read_chunks: Chunks after which it was read, each alone (`BestRead`).
        read_tokens: Tokens computed for that: the question's for each chunk, and those of missing
            chunks that the answer does not use.
        relevance: The result for each of these.
        says_none: Whether no chunk makes the question likely enough, which is then the answer
            (`none_below`).
        continued_tokens: Tokens after the cached chunks that were not computed either, because a
            recent prompt began the same way; in a full prefill, of the whole prompt.
        answered_from: Numbers, among those given, of the chunks that the answer was computed from,
            in prompt order.
        rounds: Stitched prompts that were needed (more than one with `overflow="refine"`).
        policy: The policy, as it can be pasted back.
        prefix_mismatch: Whether the caller's prompt had other text before the chunks.
        gate: Why the engine's gate let `FullRecompute()` answer instead, or "".
        rotation: "copied" if keys were copied and rotated, "deferred" if attention read them as
            stored and the query was rotated, "" for a full prefill.
        not_deferred: Why they were copied, or "".
    """

    ttft: float = 0.0
    load: float = 0.0
    stitch: float = 0.0
    choose: float = 0.0
    recompute: float = 0.0
    prefill: float = 0.0
    total: float = 0.0
    prefix_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    prefilled_tokens: int = 0
    query_tokens: int = 0
    generated_tokens: int = 0
    hits: Mapping[str, int] = field(default_factory=dict)
    misses: int = 0
    missed: tuple[Miss, ...] = ()
    auxiliary_misses: int = 0
    references: int = 0
    dropped_chunks: int = 0
    rounds: int = 1
    policy: str = ""
    prefix_mismatch: bool = False
    gate: str = ""
    rotation: str = ""
    not_deferred: str = ""
    fresh_tokens: int = 0
    unused_chunks: int = 0
    answered_from: tuple[int, ...] = ()
    continued_tokens: int = 0
    reading: float = 0.0
    read_chunks: int = 0
    read_tokens: int = 0
    relevance: tuple[Relevance, ...] = ()
    says_none: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt (of all prompts, if there were several rounds)."""
        chunks = self.reused_tokens + self.prefilled_tokens + self.fresh_tokens
        return self.prefix_tokens * self.rounds + chunks + self.query_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens that the model computed, including `read_tokens`, without a reused prefix."""
        chunks = self.prefilled_tokens + self.recomputed_tokens + self.fresh_tokens
        prefix = 0 if self.rotation else self.prefix_tokens * self.rounds
        computed = chunks + self.query_tokens + prefix + self.read_tokens
        return computed - self.continued_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and response metadata, including the sums of tokens."""
        return {
            **asdict(self),
            "missed": [asdict(miss) for miss in self.missed],
            "answered_from": [*self.answered_from],
            "relevance": [asdict(one) for one in self.relevance],
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Metrics:
        """Metrics from the output of `to_dict`, wherever a framework put it.

        Unknown keys are ignored, and missing ones have their defaults.  If a framework added up
        answers, the result is the cost of all of them.

        Raises:
            InvalidInputError: If it is something else.
        """
        try:
            if not isinstance(values, Mapping):
                raise TypeError
            if values.get("answers"):
                return summed([cls.from_dict(one) for one in values["answers"]])
            known = {one.name: values[one.name] for one in fields(cls) if one.name in values}
            missed = tuple(
                miss if isinstance(miss, Miss) else Miss(**miss) for miss in known.pop("missed", ())
            )
            relevance = tuple(
                one if isinstance(one, Relevance) else Relevance(**one)
                for one in known.pop("relevance", ())
            )
            places = tuple(map(int, known.pop("answered_from", ())))
        except TypeError:
            raise InvalidInputError(
                "metrics are read out of what Metrics.to_dict() gave, as "
                f'response.metadata["kv_cache"] is, not out of {values!r:.80}'
            ) from None
        return cls(**known, missed=missed, answered_from=places, relevance=relevance)


def summed(metrics: Sequence[Metrics]) -> Metrics:
    """Cost of several answers: numbers add up, and distinct words are listed."""
    if len(metrics) == 1:
        return metrics[0]
    found: dict[str, Any] = {}
    for one in fields(Metrics):
        values = [getattr(each, one.name) for each in metrics]
        if isinstance(one.default, bool):
            found[one.name] = any(values)
        elif isinstance(one.default, (int, float)):
            found[one.name] = sum(values)
        elif isinstance(one.default, str):
            found[one.name] = ", ".join(dict.fromkeys(filter(None, values)))
    hits = dict(sum((Counter(one.hits) for one in metrics), Counter()))
    return Metrics(**found, hits=hits, missed=tuple(miss for one in metrics for miss in one.missed))


def joined(first: Metrics, later: Metrics, before: float) -> Metrics:
    """Cost of two rounds: counts and parts add up; the first token is the later round's.

    Args:
        first: Cost of the rounds so far.
        later: Cost of the next round.
        before: Seconds from the call to the later round.
    """
    times = ("load", "stitch", "choose", "recompute", "prefill")
    counts = (
        *(
            "reused_tokens",
            "recomputed_tokens",
            "prefilled_tokens",
            "fresh_tokens",
            "continued_tokens",
        ),
        "query_tokens",
    )
    of_chunks = ("auxiliary_misses", "answered_from")
    added = (*times, *counts, *of_chunks, "generated_tokens", "rounds")
    sums = {name: getattr(first, name) + getattr(later, name) for name in added}
    # Each round tells of all chunks that were computed to be read; what was read is told once.
    known = {one.chunk for one in first.missed}
    again = [one for one in later.missed if one.chunk in known]
    brought = sum(one.tokens for one in again if one.chunk in later.answered_from)
    sums |= {
        "missed": (*first.missed, *(one for one in later.missed if one.chunk not in known)),
        "misses": first.misses + later.misses - len(again),
        "read_tokens": first.read_tokens - brought,
    }
    hits = dict(Counter(first.hits) + Counter(later.hits))
    return replace(later, **sums, hits=hits, ttft=before + later.ttft, total=before + later.total)


@dataclass(frozen=True)
class Answer:
    """A generated text and what it cost.

    Attributes:
        text: Without special tokens.
        metrics: Times and counts.
        token_ids: Ids of the generated tokens, stop token included.
        finish_reason: "stop" at an end-of-sequence token or stop string; "length" if the answer was
            cut by `max_new_tokens`, `max_time` or cancelling.
    """

    text: str
    metrics: Metrics
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
