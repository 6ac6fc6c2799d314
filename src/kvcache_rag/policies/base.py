"""The extension point: what of a stitched prompt is reused and what is computed again.

Few hooks, one small file per paper, one class.  Callers never ask which class a policy is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

from kvcache_rag.errors import InvalidInputError, NamedArguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.relevance import Numbers, Retrieved
    from kvcache_rag.stitching.stitch import StitchedPrompt


class Scorer(Protocol):
    """Says which characters of the chunks matter for a question, as an auxiliary model does."""

    def scores(self, question: str, chunks: Sequence[str]) -> Sequence[Tensor]:
        """Score every character, so that two tokenizers need only share the text.

        Args:
            question: The question as the user wrote it.
            chunks: Texts of the chunks in prompt order.

        Returns:
            Per chunk `(characters,)` float32 on the CPU; higher matters more.  An attribute
            `misses` says how many chunks had to be prefilled first (`Metrics.auxiliary_misses`).
        """


Signal: TypeAlias = Literal["deviation", "relevance", "attention"]
"""What `Signals` can tell, by the names of its methods."""


class Signals(Protocol):
    """What the engine can tell a policy about a loaded and stitched prompt, computed on request."""

    def deviation(self, layer: int) -> Tensor:
        """How far stitched values are from a full prefill's at one layer.

        All context tokens run up to `layer` (0-based) on a copy.

        Returns:
            `(context_tokens,)` float32: squared L2 distance of V over heads and width.
        """

    def relevance(self) -> Tensor:
        """Scores of the context tokens from the policy's scorer, aligned by character offsets.

        Returns:
            `(context_tokens,)` float32; the prefix has the lowest score.
        """

    def attention(self) -> Tensor:
        """How much the query attends to each context token, in one run over the stitched context.

        Returns:
            `(context_tokens,)` float32 on the CPU: attention weights after softmax, summed over
            layers, heads and the query's tokens.
        """


@dataclass(frozen=True)
class AttentionScaling:
    """How query and generated tokens weigh the chunks against the rest (APE, arXiv 2502.05431).

    Attributes:
        temperature: Divides the scores of chunk tokens; 1 is plain attention.
        scale: Multiplies `temperature` times the log-sum-exp of these; 1 is plain attention at
            temperature 1.
    """

    temperature: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True)
class Plan:
    """Which chunks the answer uses, in which order, and how many are computed with the query.

    Attributes:
        order: Numbers, among those given, of the chunks used, in prompt order.
        fresh: How many of the last are computed together with the query, after the others.  They
            need not be cached.
        others: Numbers of those left out, in the order in which they replace one that does not fit;
            None if all that fit are used.
    """

    order: tuple[int, ...]
    fresh: int = 0
    others: tuple[int, ...] | None = None

    @property
    def brought(self) -> tuple[int, ...]:
        """Numbers of the chunks whose keys and values are loaded, in prompt order."""
        return self.order[: len(self.order) - self.fresh]


class ReusePolicy(NamedArguments, ABC):
    """How cached chunks are used.

    Attributes:
        positions: Where the chunks are placed.
        joint: Whether the chunks of a prompt are computed and stored together, as one.
        adjacent_query: Whether the query starts right after the highest position of a chunk, not
            after as many positions as there are tokens (they differ when composite).
        reads: The signals that `select` chooses single tokens by.
        auxiliary: The scorer; None for the engine's.
        scaling: How the query weighs the chunks; None for plain attention.
        head: How many first tokens of chunks it computes again; chunks of models with recurrent
            layers are cut after these.
    """

    positions: PositionScheme = "reordered"
    joint: ClassVar[bool] = False
    adjacent_query: bool = False
    reads: tuple[Signal, ...] = ()
    auxiliary: Scorer | None = None
    scaling: AttentionScaling | None = None
    head: int = 0
    name: ClassVar[str]

    @property
    def is_full(self) -> bool:
        """Whether everything is computed in a plain prefill that loads nothing."""
        return False

    @property
    def is_reuse(self) -> bool:
        """Whether no loaded token is ever computed again."""
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("chosen", "arranged"):
            if name in vars(cls):
                raise InvalidInputError(
                    f"{cls.__name__}.{name}() is asked no more; say what it said in plan(retrieved)"
                )

    def plan(self, retrieved: Retrieved) -> Plan:
        """Choose the chunks to answer from, their order, and which are computed with the query.

        It is called again for the chunks that fit the window, and once `wants` has been read.
        """
        return Plan(tuple(range(len(retrieved))))

    def wants(self, retrieved: Retrieved) -> tuple[Numbers, ...]:
        """Contexts after which the model should read the question before `plan` is called again.

        Returns:
            Contexts not in `retrieved.read` yet, the most important first, because those that would
            cost too much are skipped (`generation/reading.py`). () for nothing more.
        """
        return ()

    def needs(self, retrieved: Retrieved) -> Numbers:
        """Chunks whose keys and values an answer looks for: all that are read, else those loaded.

        Returns:
            Numbers, in prompt order as far as that is known.
        """
        read = {number for context in self.wants(retrieved) for number in context}
        return tuple(sorted(read)) if read else self.plan(retrieved).brought

    @abstractmethod
    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """Choose context tokens to compute again in the context of the whole prompt.

        Args:
            prompt: The prompt's spans; the query is always computed.
            signals: Measured on the loaded prompt, each only on request.

        Returns:
            `(context_tokens,)` bool.
        """


class PlainReuse(ReusePolicy):
    """Reuses what it loads as it is."""

    @property
    def is_reuse(self) -> bool:
        """Always."""
        return True

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """No token."""
        from kvcache_rag.policies.selection import nothing  # loads torch

        return nothing(prompt)


class RatioPolicy(ReusePolicy):
    """Computes a share `ratio` of the tokens again: 0 is `Reuse()`, 1 a full prefill.

    Attributes:
        ratio: Share of the chunk tokens.
        signal: The signal they are chosen by.
    """

    ratio: float
    signal: ClassVar[Signal]

    @property
    def reads(self) -> tuple[Signal, ...]:  # type: ignore[override]  # follows the ratio
        """Nothing, unless there is a choice."""
        return (self.signal,) if 0 < self.ratio < 1 else ()

    @property
    def is_full(self) -> bool:
        """At ratio 1."""
        return self.ratio == 1

    @property
    def is_reuse(self) -> bool:
        """At ratio 0."""
        return self.ratio == 0

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """The tokens with the highest scores; of equal ones the first."""
        from kvcache_rag.policies.selection import candidates, nothing, share, top  # loads torch

        count, allowed = share(self.ratio, prompt), candidates(prompt)
        if not count or not allowed.any():
            return nothing(prompt)
        if count >= int(allowed.sum()):
            return allowed
        return top(self.scores(signals), count, allowed)

    def scores(self, signals: Signals) -> Tensor:
        """The scores tokens are chosen by, `(context_tokens,)` float32."""
        found: Tensor = getattr(signals, self.signal)()
        return found


def with_auxiliary(policy: ReusePolicy, auxiliary: Scorer) -> ReusePolicy:
    """A policy with its own scorer replaced by another."""
    given: Any = policy
    if policy.auxiliary is None or "auxiliary" not in {field.name for field in fields(given)}:
        return policy
    changed: ReusePolicy = replace(given, auxiliary=auxiliary)
    return changed
