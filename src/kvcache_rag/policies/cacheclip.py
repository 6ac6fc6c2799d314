"""Compute the tokens again that a small auxiliary model attends to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.policies.base import RatioPolicy, Scorer
from kvcache_rag.policies.checks import checked_count, checked_positions, checked_ratio
from kvcache_rag.policies.policy_registry import PolicySyntax

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.base import Signal, Signals
    from kvcache_rag.policies.policy_registry import PolicyArguments
    from kvcache_rag.stitching.stitch import StitchedPrompt


RatioOf: TypeAlias = Literal["chosen", "recomputed"]


@dataclass(frozen=True)
class CacheClip(RatioPolicy):
    """Compute the tokens again that matter for the question (CacheClip, arXiv 2510.10129, 3.2-3.3).

    A small auxiliary model reads the question after its own cached chunks, on the CPU while the
    main model loads; the tokens it attends to most in its last layer are chosen.  Then a window of
    `window` tokens is computed again as a whole if more than `threshold` of them were chosen, else
    not at all, so that no number or name is half recomputed.  Grouping changes the number of
    tokens: `ratio` is the share chosen before it, as in the paper.  So `Metrics.recomputed_tokens`
    is smaller if chosen tokens are scattered (6 to 11 % for a ratio of 0.2 with SmolLM2 on real
    text, docs/experiments.md) and may be larger if they are close together (less than `window /
    threshold` times).  `ratio_of="recomputed"` keeps to the ratio.

    Attributes:
        auxiliary: Scores the chunks: an `Auxiliary`, or anything with its method `scores`; None for
            the engine's (`Engine(auxiliary=...)`).
        ratio: Share chosen of the eligible tokens, those of all chunks but the first (which is
            exact already): 0 is `Reuse()`, 1 a full prefill.
        window: Tokens of a group, counted from the start of each chunk.
        threshold: A group with more chosen tokens than this is computed again.  A window of 1 and a
            threshold of 0 mean no grouping.  None takes the groups of highest mean score instead,
            as many as fit `ratio`, so that the cost does not depend on how scattered the scores are
            (not in the paper).
        positions: Where the chunks are placed.
        ratio_of: What `ratio` is a share of: tokens "chosen", as in the paper, or "recomputed".
            The latter chooses as many as it takes for the windows to fill the ratio, and none if
            that is less than a window.

    Raises:
        InvalidInputError: If a number is out of its range, or the auxiliary has no `scores`.
    """

    name: ClassVar[str] = "cacheclip"
    signal: ClassVar[Signal] = "relevance"
    _forms = (
        PolicySyntax(
            "cacheclip[:RATIO[,THRESHOLD or mean[,recomputed]]]", lambda words: _written(words)
        ),
    )
    auxiliary: Scorer | None = None
    ratio: float = 0.2
    window: int = 8
    threshold: int | None = 5
    positions: PositionScheme = "reordered"
    ratio_of: RatioOf = "chosen"

    def __post_init__(self) -> None:
        checked_ratio(self.ratio)
        checked_count("window", self.window)
        if self.threshold is not None:
            checked_count("threshold", self.threshold, least=0)
        checked_positions(self.positions)
        if self.threshold is not None and self.threshold >= self.window:
            raise InvalidInputError(
                f"threshold {self.threshold} is not less than the {self.window} tokens of a "
                "window, of which more would have to be chosen; make it smaller"
            )
        if self.ratio_of not in ("chosen", "recomputed"):
            raise InvalidInputError(
                f'ratio_of must be "chosen" or "recomputed", not {self.ratio_of!r}'
            )
        if self.auxiliary is not None and not callable(getattr(self.auxiliary, "scores", None)):
            raise InvalidInputError(
                f"auxiliary must have a method scores, such as Auxiliary.from_pretrained(name), "
                f"not {self.auxiliary!r}"
            )

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """Windows with enough of the tokens with the highest scores."""
        from kvcache_rag.policies.selection import (  # loads torch
            candidates,
            filled_windows,
            grouped,
            nothing,
            top,
            top_windows,
        )

        allowed = candidates(prompt)
        choosable = int(allowed.sum())
        count = round(self.ratio * choosable)
        if not count:
            return nothing(prompt)
        if count == choosable:
            return allowed
        scores = self.scores(signals)
        if self.threshold is None:
            return top_windows(scores, count, allowed, prompt, self.window)
        if self.ratio_of == "recomputed":
            return filled_windows(scores, count, allowed, prompt, self.window, self.threshold)
        chosen = top(scores, count, allowed)
        return grouped(chosen, prompt, self.window, self.threshold)


def _written(words: PolicyArguments) -> CacheClip:
    """By ratio and threshold, where "mean" is no threshold; what stands last may be left out."""
    if len(words.values) > 3 or words.values[2:] not in ((), ("recomputed",)):
        raise words.refusal()
    options: dict[str, Any] = {}
    if words.values:
        options["ratio"] = words.number(0, float)
    if len(words.values) > 1:
        options["threshold"] = None if words.values[1] == "mean" else words.number(1, int)
    if len(words.values) > 2:
        options["ratio_of"] = "recomputed"
    return CacheClip(words.auxiliary, **options)
