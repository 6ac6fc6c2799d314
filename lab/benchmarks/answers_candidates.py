"""Ways to answer that `answers.py` asks beside the package's policies, to see what decides.

`POLICY@last`: any policy with the retriever's best document last; `fewer`: full prefill of the
best documents alone, which `bestlast` has to beat; `random`: a choice by nothing, of as many tokens
as `cacheclip` chooses.  What pays becomes a policy of the package; what does not is a
paragraph of docs/experiments.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from kvcache_rag import BestLast, ReusePolicy, policy_by_name
from kvcache_rag.policies.base import Arrangement
from kvcache_rag.policies.named import Form
from kvcache_rag.policies.selection import candidates, top

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitching.stitch import StitchedPrompt

LAST: Final = "@last"


@dataclass(frozen=True)
class WithBestLast(ReusePolicy):
    """A policy over documents of which the best stands last."""

    name: ClassVar[str] = "with best last"
    policy: ReusePolicy

    @property
    def is_full(self) -> bool:
        return self.policy.is_full

    @property
    def is_reuse(self) -> bool:
        return self.policy.is_reuse

    @property
    def needs_scorer(self) -> bool:  # type: ignore[override]  # follows its policy
        return self.policy.needs_scorer

    def arranged(self, scores: Sequence[float]) -> Arrangement:
        return Arrangement(BestLast().arranged(scores).order)

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        return self.policy.select(prompt, signals)


@dataclass(frozen=True)
class RandomTokens(ReusePolicy):
    """Any tokens: what a choice of as many has to beat.

    Attributes:
        ratio: Part of the tokens that may be chosen, as of `CacheClip`.
    """

    name: ClassVar[str] = "random"
    _forms = (Form("random[:RATIO]", lambda words: RandomTokens(*words.numbers(float))),)
    ratio: float = 0.2

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        allowed = candidates(prompt)
        drawn = torch.rand(
            len(allowed), generator=torch.Generator().manual_seed(prompt.context_tokens)
        )
        return top(drawn, round(self.ratio * int(allowed.sum())), allowed)


@dataclass(frozen=True)
class Fewer(BestLast):
    """A full prefill of the best chunks alone, as if no more of them had been retrieved."""

    name: ClassVar[str] = "fewer"
    computes_chunks: ClassVar[bool] = False

    @property
    def is_full(self) -> bool:
        return True

    def arranged(self, scores: Sequence[float]) -> Arrangement:
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
        return Arrangement(tuple(ranked[: max(1, round(self.share * len(scores)))]))


MORE: Final[dict[str, Callable[..., ReusePolicy]]] = {
    "fewer": Fewer,
    "random": RandomTokens,
}


def candidate(label: str, **options: Any) -> ReusePolicy:
    """The policy of a label, of the package or of this module."""
    if label.endswith(LAST):
        return WithBestLast(candidate(label.removesuffix(LAST), **options))
    name, _, number = label.partition(":")
    if name in MORE:
        return MORE[name](*([float(number)] if number else []))
    return policy_by_name(label, **options)
