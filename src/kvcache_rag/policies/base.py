"""The extension point: what of a stitched prompt is reused and what is computed again.

Few hooks, one small file per paper, one class.  A caller never asks which class a policy is:
several at once (`Union`) are a policy, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.stitching.stitch import StitchedPrompt


_T = TypeVar("_T")


class Scorer(Protocol):
    """Says which characters of the chunks matter for a question (an auxiliary model does)."""

    def scores(self, question: str, chunks: Sequence[str]) -> Sequence[Tensor]:
        """Score every character, so that two tokenizers need nothing in common but the text.

        Args:
            question: Text of the question, as the user wrote it.
            chunks: Texts of the chunks in prompt order.

        Returns:
            Per chunk `(characters,)` float32 on the CPU; larger matters more.  An attribute
            `misses` says how many chunks had to be prefilled first (`Metrics.auxiliary_misses`).
        """


class Signals(Protocol):
    """What the engine can tell a policy about a loaded and stitched prompt, computed when asked."""

    @property
    def layers(self) -> int:
        """How many layers the model has."""

    def deviation(self, layer: int) -> Tensor:
        """How far stitched values are from those of a full prefill at one layer.

        Computed on a copy by running all context tokens up to `layer` (0-based).

        Returns:
            `(context_tokens,)` float32: squared L2 distance of V over heads and width.
        """

    def deviation_tokens(self, layer: int) -> int:
        """As many tokens computed again take about the time of `deviation(layer)`; 0 once known."""

    def relevance(self) -> Tensor:
        """Scores of the context tokens by the policy's scorer, aligned by character offsets.

        Returns:
            `(context_tokens,)` float32; the prefix has the lowest score.
        """

    def attention(self) -> Tensor:
        """How much the query attends to each context token, running once over the stitched context.

        Returns:
            `(context_tokens,)` float32 on the CPU: attention weights after softmax, summed over
            layers, heads and the query's tokens.
        """

    def attention_tokens(self) -> int:
        """As many tokens computed again take about the time of `attention()`; 0 once known."""

    def affordable(self, seconds: float) -> int:
        """How many context tokens can be computed again in `seconds`, by measured rates."""


@dataclass(frozen=True, eq=False)
class LayerCheck:
    """What computing tokens again has shown at one layer, before its attention.

    Attributes:
        layer: Which, 0-based.
        layers: How many the model has.
        alive: `(context_tokens,)` bool, tokens that are computed again up to here.
        deviation: `(context_tokens,)` float32 on the CPU: of these tokens, the squared L2 distance
            of V, over heads and width, from the stitched value; 0 of others.
    """

    layer: int
    layers: int
    alive: Tensor
    deviation: Tensor


@dataclass(frozen=True)
class AttentionScaling:
    """How query and generated tokens weigh the chunks against the rest (APE, 2502.05431).

    Attributes:
        temperature: Divides the scores of chunk tokens; 1 is plain attention.
        scale: Multiplies `temperature` times the log-sum-exp of these; 1 is plain attention at
            temperature 1.
    """

    temperature: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True)
class Arrangement:
    """How the chunks of a prompt stand, and what becomes of the last ones.

    Attributes:
        order: Numbers of the chunks as they were given, in prompt order.
        fresh: How many of the last are computed together with the query, behind the others, which
            are reused as they are.  They need not be cached.
    """

    order: tuple[int, ...]
    fresh: int = 0

    @property
    def brought(self) -> tuple[int, ...]:
        """Numbers of the others, in prompt order."""
        return self.order[: len(self.order) - self.fresh]


class ReusePolicy(ABC):
    """How cached chunks are used.

    Attributes:
        positions: Where the chunks stand.
        joint: Whether the chunks of a prompt are computed and stored together, as one.
        computes_chunks: Whether it has whole chunks computed with the query (`arranged`) and
            nothing else again.
        adjacent_query: Whether the query stands right behind the highest position of a chunk
            instead of behind as many positions as there are tokens (they differ when composite).
        needs_scorer: Whether `select` reads `signals.relevance()`.
        auxiliary: The scorer, None for the engine's own.
        scaling: How the query weighs the chunks; None is plain attention.
        narrowing_layers: Layers at which `narrow` is asked, 0-based and ascending.
    """

    positions: PositionScheme = "reordered"
    joint: ClassVar[bool] = False
    computes_chunks: ClassVar[bool] = False
    adjacent_query: bool = False
    needs_scorer: bool = False
    auxiliary: Scorer | None = None
    scaling: AttentionScaling | None = None
    name: ClassVar[str]

    @property
    def narrowing_layers(self) -> tuple[int, ...]:
        """None, unless a policy says so."""
        return ()

    @property
    def is_full(self) -> bool:
        """Whether everything is computed: a plain prefill that loads nothing."""
        return False

    @property
    def is_reuse(self) -> bool:
        """Whether nothing is computed again, whatever the prompt."""
        return False

    def signal_tokens(self, signals: Signals) -> int:
        """What the signals cost that `select` will ask for, in tokens computed again.

        Only what delays the answer counts, so not a scorer that works while chunks are loaded.
        """
        return 0

    def resolved(self, prompt: StitchedPrompt, signals: Signals) -> ReusePolicy:
        """The policy that selects for this prompt: itself, unless it is a choice among others.

        It may differ in what it selects, not in where the chunks stand or how they are weighed.

        Args:
            prompt: The prompt's spans.
            signals: As for `select`.
        """
        return self

    def __or__(self, other: ReusePolicy) -> ReusePolicy:
        """Compute again what either policy chooses: `LegoLink(4) | CacheBlend(0.1)`.

        Raises:
            InvalidInputError: If they want different things that exclude each other.
        """
        return Union(self, other) if isinstance(other, ReusePolicy) else NotImplemented

    def arranged(self, scores: Sequence[float]) -> Arrangement:
        """In which order the chunks stand, and which of them are computed with the query.

        Args:
            scores: Of each chunk as it was given, by who retrieved them; higher is better.
        """
        return Arrangement(tuple(range(len(scores))))

    @abstractmethod
    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """Which context tokens are computed again in the context of the whole prompt.

        Args:
            prompt: The prompt's spans; the query is always computed.
            signals: Measured on the loaded prompt, each only when it is asked for.

        Returns:
            `(context_tokens,)` bool.
        """

    def narrow(self, prompt: StitchedPrompt, check: LayerCheck) -> Tensor:
        """Which tokens go on being computed again from one of `narrowing_layers` on.

        What is dropped keeps its new keys and values up to this layer, this one included, and its
        stitched ones behind it.

        Args:
            prompt: The prompt's spans.
            check: What is known at that layer.

        Returns:
            `(context_tokens,)` bool, within `check.alive`.
        """
        return check.alive


MOST_PARTS = 64
"""Of a union: each one chooses tokens for every question."""


@dataclass(frozen=True, init=False, repr=False)
class Union(ReusePolicy):
    """Compute again what any of its policies chooses: `LegoLink(4) | CacheBlend(0.1)`.

    Each policy chooses as if it were alone, so that the numbers of tokens add up except where the
    choices overlap.

    Attributes:
        policies: Its parts; a union among them is taken apart, and equal ones count once.

    Raises:
        InvalidInputError: If there is none, or more than `MOST_PARTS`, or they exclude each other:
            different `positions`, auxiliary models or attention scaling, chunks computed together,
            or chunks that overlap the query's place (`Ape`) and tokens to be computed again.
    """

    name: ClassVar[str] = "union"
    policies: tuple[ReusePolicy, ...]

    def __init__(self, *policies: ReusePolicy) -> None:
        flat: list[ReusePolicy] = []
        for policy in policies:
            if not isinstance(policy, ReusePolicy):
                raise InvalidInputError(
                    f"a union joins policies such as LegoLink(), not {policy!r}"
                )
            parts = policy.policies if isinstance(policy, Union) else (policy,)
            flat += [part for part in parts if part not in flat]
            if len(flat) > MOST_PARTS:
                raise InvalidInputError(f"a union joins at most {MOST_PARTS} different policies")
        if not flat:
            raise InvalidInputError("a union needs at least one policy, such as LegoLink()")
        object.__setattr__(self, "policies", tuple(flat))
        _refuse_conflicts(flat)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.policies))})"

    @property
    def _moving(self) -> tuple[ReusePolicy, ...]:
        """Those whose wishes about places count: all, or those that compute everything."""
        full = tuple(policy for policy in self.policies if policy.is_full)
        return full or self.policies

    @property
    def positions(self) -> PositionScheme:  # type: ignore[override]  # follows its parts
        """Those of its parts."""
        return self._moving[0].positions

    @property
    def joint(self) -> bool:  # type: ignore[override]  # follows its parts
        """Whether its only part computes chunks together."""
        return self._moving[0].joint

    @property
    def adjacent_query(self) -> bool:  # type: ignore[override]  # follows its parts
        """That of its parts."""
        return any(policy.adjacent_query for policy in self._moving)

    @property
    def needs_scorer(self) -> bool:  # type: ignore[override]  # follows its parts
        """Whether a part reads scores."""
        return any(policy.needs_scorer for policy in self._moving)

    @property
    def auxiliary(self) -> Scorer | None:  # type: ignore[override]  # follows its parts
        """The scorer of its parts."""
        return _only([policy.auxiliary for policy in self.policies])

    @property
    def scaling(self) -> AttentionScaling | None:  # type: ignore[override]  # follows its parts
        """That of its parts."""
        return _only([policy.scaling for policy in self._moving])

    @property
    def is_full(self) -> bool:
        """Whether one of its parts computes everything."""
        return any(policy.is_full for policy in self.policies)

    @property
    def is_reuse(self) -> bool:
        """Whether none of its parts computes anything again."""
        return all(policy.is_reuse for policy in self.policies)

    def arranged(self, scores: Sequence[float]) -> Arrangement:
        """In the order that one of its parts wants; what it computes, `select` names.

        Of several, in that of the part that has most computed: a smaller share stands last in it,
        too.
        """
        given = tuple(range(len(scores)))
        wanted = [policy.arranged(scores) for policy in self._moving]
        moving = [one for one in wanted if one.order != given]
        return Arrangement(max(moving, key=lambda one: one.fresh).order if moving else given)

    def signal_tokens(self, signals: Signals) -> int:
        """Those of the costliest part (deviations at two layers share most of their work)."""
        return max(policy.signal_tokens(signals) for policy in self.policies)

    def resolved(self, prompt: StitchedPrompt, signals: Signals) -> ReusePolicy:
        """The union of its parts as they are for this prompt."""
        return Union(*(policy.resolved(prompt, signals) for policy in self.policies))

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """What any of its parts chooses."""
        from kvcache_rag.policies.selection import nothing  # loads torch

        selected = nothing(prompt)
        for policy in self.policies:
            if not policy.is_reuse:
                selected = selected | policy.select(prompt, signals)
        return selected


def _only(values: list[_T | None]) -> _T | None:
    return next((value for value in values if value is not None), None)


def _refuse_conflicts(policies: list[ReusePolicy]) -> None:
    if len(policies) == 1 or any(policy.is_full for policy in policies):
        return
    if any(policy.joint for policy in policies):
        raise InvalidInputError(
            f"{_named(policies)} cannot be joined: chunks that were computed together have nothing "
            "to be computed again; use Combination() alone"
        )
    if any(policy.narrowing_layers for policy in policies):
        raise InvalidInputError(
            f"{_named(policies)} cannot be joined: one narrows its choice from layer to layer, and "
            "the other's tokens would be dropped with it; leave check_layers away"
        )
    if any(policy.adjacent_query for policy in policies) and not all(
        policy.is_reuse for policy in policies
    ):
        raise InvalidInputError(
            f"{_named(policies)} cannot be joined: where chunks overlap and the query stands right "
            "behind them, tokens computed again have no place of their own; use one of them"
        )
    for hook, what in (
        ("positions", "positions of the chunks"),
        ("scaling", "scaling of the attention"),
        ("adjacent_query", "place of the query"),
    ):
        wishes = {getattr(policy, hook) for policy in policies}
        if len(wishes) > 1:
            raise InvalidInputError(
                f"{_named(policies)} cannot be joined: they want a different {what}; "
                + ("give all the same positions" if hook == "positions" else "use one of them")
            )
    scorers = [policy.auxiliary for policy in policies if policy.auxiliary is not None]
    if any(scorer is not scorers[0] for scorer in scorers):
        raise InvalidInputError(
            f"{_named(policies)} cannot be joined: they have different auxiliary models; give all "
            "the same"
        )


def _named(policies: list[ReusePolicy]) -> str:
    return " and ".join(map(repr, policies))
