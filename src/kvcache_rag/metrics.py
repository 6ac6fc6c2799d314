"""What an answer cost, what would make it cost less, and the answer itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from kvcache_rag.errors import InvalidInputError

MissReason: TypeAlias = Literal[
    "not prefilled", "evicted", "damaged", "not signed", "other model", "other text"
]
"""Why a chunk had to be computed.  `not prefilled`: as far as is known, nobody did so far.
`evicted`: it was stored, and dropped since by a limit, a release, a deletion or its `ttl`.
`damaged`: its file was not what it should be, and was put aside.  `not signed`: not by the store's
key.  `other model`: its reference is about another model, adapter, dtype, codec, instruction or
tenant.  `other text`: its reference is about another text."""


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
class Metrics:
    """Cost of one answer.  Times are seconds, everything else counts.

    Attributes:
        ttft: From the call to the first generated token.
        load: Part of `ttft`: reading cached chunks (of those read beside the forward pass, only the
            seconds for which it had to wait), and prefilling and storing those that were missing.
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
            context of the others (`BestLast`); neither loaded nor stored.
        prefilled_tokens: Chunk tokens computed for this answer, because they were not cached or
            loading them was declined.
        query_tokens: Tokens of history, question and everything behind the chunks.
        generated_tokens: Tokens of the answer.
        hits: Chunks found, per tier.
        misses: Chunks that were not cached (they are now, if the store could keep them).
        missed: Which those are, and why, in prompt order.
        auxiliary_misses: Chunks that an auxiliary model had not cached when it scored them (its
            own; they are cached now).
        references: Chunks given by a reference that holds, whose text was not tokenised.
        declined: Chunks that were cached and prefilled all the same, because this machine's
            measured rates say that this is sooner; per reason (tier and both times), how many.
        dropped_chunks: Chunks left out because the prompt would not fit.
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
    declined: Mapping[str, int] = field(default_factory=dict)
    dropped_chunks: int = 0
    rounds: int = 1
    policy: str = ""
    prefix_mismatch: bool = False
    gate: str = ""
    rotation: str = ""
    not_deferred: str = ""
    fresh_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt (of all prompts, if there were several rounds)."""
        chunks = self.reused_tokens + self.prefilled_tokens + self.fresh_tokens
        return self.prefix_tokens * self.rounds + chunks + self.query_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that the model computed; a prefix that is reused is none of them."""
        chunks = self.prefilled_tokens + self.recomputed_tokens + self.fresh_tokens
        prefix = 0 if self.rotation else self.prefix_tokens * self.rounds
        return chunks + self.query_tokens + prefix

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for response metadata; with the sums of tokens."""
        return {
            **asdict(self),
            "missed": [asdict(miss) for miss in self.missed],
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Metrics:
        """Metrics out of what `to_dict` gave, wherever a framework put it.

        Keys that are no attributes are left out, and attributes without a key have their defaults.

        Raises:
            InvalidInputError: If it is something else.
        """
        try:
            if not isinstance(values, Mapping):
                raise TypeError
            known = {one.name: values[one.name] for one in fields(cls) if one.name in values}
            missed = tuple(
                miss if isinstance(miss, Miss) else Miss(**miss) for miss in known.pop("missed", ())
            )
        except TypeError:
            raise InvalidInputError(
                "metrics are read out of what Metrics.to_dict() gave, as "
                f'response.metadata["kv_cache"] is, not out of {values!r:.80}'
            ) from None
        return cls(**known, missed=missed)

    def summary(self) -> str:
        """Two sentences: where the time to the first token went, and what would help."""
        advice = next(rule.advice for rule in _RULES if rule.applies(self))
        told = {"m": self, "policy": _clause(self.policy), "gate": _clause(self.gate)}
        return f"{_spent(self)} {advice.format(**told)}"


# ---------------------------------------------------------------------- where the time went
_PARTS: Final = ("load", "stitch", "choose", "recompute", "prefill")

_TOLD: Final = 0.05  # of `ttft`: smaller parts are not told

_NOTABLE: Final = 0.2  # of `ttft`: what smaller parts could save is not worth an advice


def _spent(metrics: Metrics) -> str:
    seconds = {name: at for name, at in _seconds(metrics).items() if _share(metrics, name) >= _TOLD}
    parts = [
        f"{_named(metrics, name)} {_time(at)} ({_share(metrics, name):.0%})"
        for name, at in sorted(seconds.items(), key=lambda part: -part[1])
    ]
    tokens = f"tokens reused: {metrics.reused_tokens}, computed: {metrics.computed_tokens}"
    if not parts:  # as of vLLM's servers
        after = f"after {_time(metrics.ttft)} " if metrics.ttft > 0 else ""
        return f"The first token came {after}and its parts were not timed; {tokens}."
    return f"The first token came after {_time(metrics.ttft)}: {', '.join(parts)}; {tokens}."


def _seconds(metrics: Metrics) -> dict[str, float]:
    """Seconds of the parts of `ttft`, with what none of them had if they were timed."""
    seconds = {name: getattr(metrics, name) for name in _PARTS}
    known = sum(seconds.values())
    return {**seconds, "rest": max(metrics.ttft - known, 0.0) if known else 0.0}


def _share(metrics: Metrics, *parts: str) -> float:
    seconds = _seconds(metrics)
    return sum(seconds[part] for part in parts) / metrics.ttft if metrics.ttft > 0 else 0.0


def _named(metrics: Metrics, part: str) -> str:
    if part == "load":
        done = {"loading": metrics.reused_tokens, "prefilling": metrics.prefilled_tokens}
        return f"{' and '.join(verb for verb, tokens in done.items() if tokens) or part} chunks"
    names = {
        "stitch": "moving keys",
        "choose": "choosing tokens",
        "recompute": "computing tokens again",
        "prefill": _computed(metrics),
        "rest": "waiting and tokenising",
    }
    return names[part]


def _computed(metrics: Metrics) -> str:
    if not metrics.rotation:
        return "computing the whole prompt"
    return f"computing the question{' and the best chunks' if metrics.fresh_tokens else ''}"


def _time(seconds: float) -> str:
    return (
        f"{seconds * 1000:.{0 if seconds >= 0.01 else 1}f} ms"
        if seconds < 1
        else f"{seconds:.1f} s"
    )


def _clause(text: str) -> str:
    """A text that ends no sentence where it stands."""
    return re.sub(r"[.!?]+(?=\s|$)", ";", " ".join(text.split())).rstrip("; ")


# ---------------------------------------------------------------------- what would help
@dataclass(frozen=True)
class _Rule:
    """One piece of advice.

    Attributes:
        applies: Whether it is the one, if none before it was.
        advice: One sentence, in which `m` are the metrics.
    """

    applies: Callable[[Metrics], bool]
    advice: str


def _matters(metrics: Metrics, *parts: str) -> bool:
    """Whether parts took enough to be worth an advice, as far as that is known."""
    is_timed = metrics.ttft > 0 and any(_seconds(metrics).values())
    return not is_timed or _share(metrics, *parts) >= _NOTABLE


def _leads(metrics: Metrics, *parts: str) -> bool:
    """Whether parts took notably long, together longer than any other."""
    others = [at for name, at in _seconds(metrics).items() if name not in parts]
    return _share(metrics, *parts) >= max(_NOTABLE, max(others) / (metrics.ttft or 1.0))


def _missed_by(reason: MissReason, metrics: Metrics) -> bool:
    """Whether this is why most of the missing tokens were computed."""
    tokens: Counter[MissReason] = Counter()
    for miss in metrics.missed:
        tokens[miss.reason] += miss.tokens
    worst = tokens.most_common(1)
    return bool(worst) and worst[0][0] == reason and _matters(metrics, "load")


def _is_loaded_slowly(metrics: Metrics) -> bool:
    if metrics.hits.keys() <= _MEMORY:
        return False
    return _leads(metrics, "load") or (not _is_told(metrics) and _leads(metrics, "load", "stitch"))


def _is_told(metrics: Metrics) -> bool:
    """Whether keys are moved because the engine was told so."""
    return 'rotation="copied"' in metrics.not_deferred


_MEMORY: Final = {"memory", "device", "combinations"}  # tiers of this process

_LONG_QUERY: Final = 256  # tokens from which a question is more than one

_MISSED: Final = "{m.prefilled_tokens} tokens of chunks were computed"

_BY_REASON: Final[Mapping[MissReason, str]] = {
    "damaged": f"{_MISSED} because files were damaged: they are in quarantine and written anew, but"
    " check the medium by `kvcache-rag store verify`.",
    "not signed": f"{_MISSED} because the store's key did not sign what it holds: sign it by"
    " `kvcache-rag store sign`, or give the store the key that did.",
    "other model": f"{_MISSED} because their references are about another model, codec, instruction"
    " or tenant: compute them for this one by `kvcache-rag rebuild`.",
    "other text": f"{_MISSED} because their texts are not those that were prefilled: prefill a text"
    " again when it is changed, and let no postprocessor rewrite it.",
    "evicted": f"{_MISSED} because the store had dropped them: raise its max_bytes or ttl, or store"
    " more in it with Int8().",
    "not prefilled": f"{_MISSED} because nobody had prefilled them: do so at ingestion"
    " (Engine.add), and the first question finds them.",
}

# The first that applies is given: what loses most, and is mended most surely, comes first.
_RULES: Final[tuple[_Rule, ...]] = (
    _Rule(
        lambda m: bool(m.gate),
        "Everything was computed because of the gate ({gate}): use a policy that passes it, or ask"
        " `kvcache-rag verify` about this one.",
    ),
    *(_Rule(partial(_missed_by, reason), advice) for reason, advice in _BY_REASON.items()),
    _Rule(  # of a server, which does not say why
        lambda m: m.misses > len(m.missed) and _matters(m, "load"),
        f"{_MISSED} because they were not cached: prefill them at ingestion, and let the store keep"
        " them.",
    ),
    _Rule(
        lambda m: bool(m.declined) and _matters(m, "load"),
        f"{_MISSED} because that is sooner than loading them: put memory or a disk of this machine"
        " before the slow store (TieredStore).",
    ),
    _Rule(
        lambda m: not m.rotation and m.prefilled_tokens > 0 and not m.misses,
        "Every answer computes every chunk under {policy}: BestLast() computes the best of them and"
        " loads the others, Reuse() loads all, for models trained for that, unless Engine.refusal"
        " says why this one cannot.",
    ),
    _Rule(
        lambda m: m.auxiliary_misses > 0 and _matters(m, "choose"),
        "The auxiliary model had to prefill chunks of its own ({m.auxiliary_misses}): give it to"
        " the engine that ingests, whose Engine.add prefills them, too.",
    ),
    _Rule(
        lambda m: _leads(m, "choose"),
        "Choosing tokens is most of it: BestLast() and LegoLink() need no pass over the context for"
        " that, which {policy} does.",
    ),
    _Rule(
        lambda m: _leads(m, "recompute"),
        "Computing {m.recomputed_tokens} tokens again is most of it: lower the ratio of {policy},"
        " or use BestLast() if `kvcache-rag verify` finds it good enough.",
    ),
    _Rule(
        lambda m: m.fresh_tokens > m.query_tokens and _leads(m, "prefill"),
        "Computing the best chunks ({m.fresh_tokens} tokens) is most of it: give smaller ones,"
        " lower the share of {policy}, or take a model that was fine-tuned for Reuse().",
    ),
    _Rule(
        _is_loaded_slowly,
        "Getting chunks out of their store is most of it: keep what is asked often in memory"
        " (TieredStore(MemoryStore(), store)), or store chunks in half the bytes (codec=Int8()).",
    ),
    _Rule(
        lambda m: _is_told(m) and _leads(m, "load", "stitch"),
        'Copying chunks and moving their keys is most of it: rotation="auto" attends to them where'
        " they lie if that is sooner.",
    ),
    _Rule(
        lambda m: m.reused_tokens > 0 and _leads(m, "load", "stitch"),
        "Copying chunks out of memory is most of it: retrieve fewer, or keep"
        " them with Int8(), which a CPU attends to as they lie.",
    ),
    _Rule(
        lambda m: m.prefix_mismatch and _matters(m, "prefill"),
        "The instruction of the prompt is not the engine's and was computed with the question: give"
        " it to the engine (PromptTemplate(system=...)) and prefill the chunks behind it.",
    ),
    _Rule(
        lambda m: m.dropped_chunks > 0,
        "Chunks were left out because the prompt would not fit ({m.dropped_chunks}): retrieve fewer"
        " or smaller ones.",
    ),
    _Rule(
        lambda m: m.rounds > 1,
        "{m.rounds} prompts were needed because the chunks do not fit into one: retrieve fewer or"
        ' smaller ones, or leave out the last ones by overflow="drop_lowest".',
    ),
    _Rule(
        lambda m: _leads(m, "rest"),
        "Waiting for the model and tokenising is most of it: answer what waits in one batch"
        " (Engine.generate_batch), and give chunks by reference (StoredChunk).",
    ),
    _Rule(
        lambda m: m.query_tokens >= _LONG_QUERY and not m.reused_tokens,
        "Nothing of the {m.query_tokens} tokens could be reused because the prompt has no chunks:"
        " give documents as chunks.",
    ),
    _Rule(
        lambda m: m.query_tokens >= _LONG_QUERY,
        "History and question have {m.query_tokens} tokens, which every answer computes: shorten"
        " the history, or give what comes again as chunks.",
    ),
    _Rule(lambda m: True, "No cache would help further: the question itself is what is left."),
)


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
        ),
        "query_tokens",
    )
    of_chunks = ("misses", "missed", "auxiliary_misses")
    added = (*times, *counts, *of_chunks, "generated_tokens", "rounds")
    sums = {name: getattr(first, name) + getattr(later, name) for name in added}
    for name in ("hits", "declined"):
        sums[name] = dict(Counter(getattr(first, name)) + Counter(getattr(later, name)))
    return replace(later, **sums, ttft=before + later.ttft, total=before + later.total)


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
