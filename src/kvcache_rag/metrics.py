"""What an answer cost, what would make it cost less, and the answer itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from kvcache_rag.errors import InvalidInputError

MissReason: TypeAlias = Literal[
    "not prefilled", "evicted", "damaged", "not signed", "unreadable", "other model", "other text"
]
"""Why a chunk had to be computed.  `not prefilled`: as far as is known, nobody did so far.
`evicted`: it was stored, and dropped since by a limit, a release, a deletion or its `ttl`.
`damaged`: its file was not what it should be, and was put aside.  `not signed`: not by the store's
key.  `unreadable`: the store could not be asked, or its file may not be read.  `other model`: its
reference is about another model, adapter, dtype, codec, instruction or tenant.  `other text`: its
reference is about another text."""


@dataclass(frozen=True)
class Miss:
    """A chunk that was not cached.

    Attributes:
        chunk: Its number among those given, from 0; of several computed together, the first one's.
        tokens: Its length.
        reason: Why it was not.
    """

    chunk: int
    tokens: int
    reason: MissReason


@dataclass(frozen=True)
class Relevance:
    """How likely a question is behind a chunk.

    Attributes:
        chunk: Its number, as it was given.
        nats: How much likelier the chunk makes the question than no chunk does; below 0 less.
    """

    chunk: int
    nats: float


@dataclass(frozen=True)
class Metrics:
    """Cost of one answer.  Times are seconds, everything else counts.

    Attributes:
        ttft: From the call to the first generated token.
        load: Part of `ttft`: reading cached chunks, and prefilling and storing those that were
            missing.
        stitch: Part of `ttft`: rotating keys to their places.
        choose: Part of `ttft`: choosing context tokens, with the signals that this needs (of an
            auxiliary model, which works beside the loading, only the seconds that it took longer).
        recompute: Part of `ttft`: computing the chosen tokens again, in one pass with the query but
            its last token.
        prefill: Part of `ttft`: the forward pass of what is left of the query (of everything, for a
            full prefill).
        total: From the call to the last token.
        prefix_tokens: Tokens of the shared prefix.
        reused_tokens: Chunk tokens whose keys and values came from the store.
        recomputed_tokens: Context tokens that a policy computed again.
        fresh_tokens: Chunk tokens that the policy had computed together with the query, in the
            context of the others (`BestFew`, `BestLast`); neither loaded nor stored.
        prefilled_tokens: Chunk tokens computed for this answer, because they were not cached.
        query_tokens: Tokens of history, question and everything behind the chunks.
        generated_tokens: Tokens of the answer.
        hits: Chunks found, per tier.
        misses: Chunks that were not cached (they are now, if the store could keep them).
        missed: Which those are, and why, in prompt order.
        auxiliary_misses: Chunks that an auxiliary model had not cached when it scored them (its
            own; they are cached now).
        references: Chunks given by a reference that holds, whose text was not tokenised.
        dropped_chunks: Chunks left out because the prompt would not fit.
        unused_chunks: Chunks left out because the policy answers from better ones (`BestFew`).
        reading: Part of `ttft`: reading the question behind chunks, to choose among them.
        read_chunks: Chunks behind which it was read, each alone (`BestRead`).
        read_tokens: Tokens that were computed for that: the question's behind each, and those of
            chunks that were not cached and are not answered from.
        relevance: What was found of each of these.
        says_none: Whether no chunk makes the question likely enough, so that this is the answer
            (`none_below`).
        continued_tokens: Tokens behind the chunks that were brought which were not computed either,
            as one of the last prompts began alike; in a full prefill, of the whole prompt.
        answered_from: Numbers of the chunks that the answer was computed from, as they were given,
            in prompt order.
        rounds: Stitched prompts that were needed (more than one with `overflow="refine"`).
        policy: The policy, as it can be pasted back.
        prefix_mismatch: Whether the caller's prompt wanted other text before the chunks.
        gate: Why the engine's gate let `FullRecompute()` answer instead, or "".
        rotation: "copied" where keys were copied and rotated, "deferred" where they were attended
            to as they are stored and the query was rotated, "" for a full prefill.
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
        """Tokens of the prompt that the model computed, without a prefix that is reused."""
        chunks = self.prefilled_tokens + self.recomputed_tokens + self.fresh_tokens
        prefix = 0 if self.rotation else self.prefix_tokens * self.rounds
        computed = chunks + self.query_tokens + prefix + self.read_tokens
        return computed - self.continued_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for response metadata; with the sums of tokens."""
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
        """Metrics out of what `to_dict` gave, wherever a framework put it.

        Keys that are no attributes are left out, and attributes without a key have their defaults.
        Where a framework added answers up, it is the cost of all of them.

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
    """Cost of several answers: numbers add up, and of words those that differ are listed."""
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
    """Cost of two rounds: counts and parts add up, the first token is that of the later round.

    Args:
        first: Of the rounds so far.
        later: Of the round behind them.
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
    of_chunks = ("misses", "missed", "auxiliary_misses", "answered_from")
    added = (*times, *counts, *of_chunks, "generated_tokens", "rounds")
    sums = {name: getattr(first, name) + getattr(later, name) for name in added}
    hits = dict(Counter(first.hits) + Counter(later.hits))
    return replace(later, **sums, hits=hits, ttft=before + later.ttft, total=before + later.total)


@dataclass(frozen=True)
class Answer:
    """A generated text and what it cost.

    Attributes:
        text: Without special tokens.
        metrics: Times and counts.
        token_ids: Ids of the generated tokens, stop token included.
        finish_reason: "stop" at an end-of-sequence token or stop string, "length" where the answer
            was cut: at `max_new_tokens` or `max_time`, or when it was cancelled.
    """

    text: str
    metrics: Metrics
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
