"""Which policy answers a question, with one warning if another one does."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.models.adapters import hidden_size, trained_for_blocks
from kvcache_rag.policies.checks import why_not
from kvcache_rag.policies.default import default_policy, reuse_warning

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvcache_rag.generation.gate import BoundGate
    from kvcache_rag.generation.request import Request
    from kvcache_rag.models.language import Abilities
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.prefill import Prefiller
    from kvcache_rag.prompt.renderer import PromptRenderer

_PACKAGE: Final = __name__.partition(".")[0]


@dataclass(frozen=True)
class PolicyGuard:
    """What decides about the policy of a request.

    Attributes:
        policy: What is reused when a call does not say.
        trained: Whether the model was trained for blocks.
        is_default: Whether nobody insists on the policy: it follows the adapters, and yields to
            full prefill on a model that is refused.
        abilities: The model's.
        gate: Lets policies through; None for all.
        compares: Whether policies are compared, and so each asked for on purpose.
        warned: What was said already, by all engines made of one.
    """

    policy: ReusePolicy
    trained: bool
    is_default: bool
    abilities: Abilities
    gate: BoundGate | None = None
    compares: bool = False
    warned: set[str] = field(default_factory=set)

    @classmethod
    def from_model(cls, model: Any, given: ReusePolicy | None, abilities: Abilities) -> PolicyGuard:
        """What decides for a model whose adapters are as they are now.

        Args:
            model: As transformers or PEFT has it.
            given: The policy that was asked for, or None.
            abilities: The model's.
        """
        trained = trained_for_blocks(model)
        policy = given or _default(model, trained, abilities)
        return cls(policy, trained, given is None, abilities)

    @property
    def refusal(self) -> str:
        """Why chunks of the model cannot be stitched, "" if they can."""
        return self.abilities.cannot_stitch

    def rebound(self, model: Any, prefiller: Prefiller | None, renderer: PromptRenderer) -> Self:
        """The same after weights, adapters or the tokenizer may have changed."""
        trained = trained_for_blocks(model)
        policy = _default(model, trained, self.abilities) if self.is_default else self.policy
        gate = self.gate
        if gate is not None and prefiller is not None:
            gate = gate.rebound(prefiller, renderer)
        return replace(self, policy=policy, trained=trained, gate=gate)

    def yields(self, policy: ReusePolicy, chunks: int) -> bool:
        """Whether full prefill answers instead of a policy that would bring so many chunks."""
        is_own = self.is_default and policy is self.policy
        return is_own and bool(why_not(policy, self.abilities, chunks))

    def why_useless(self, policy: ReusePolicy) -> str:
        """Why storing chunks is of no use to answers by a policy, "" if it is of use."""
        is_of_use = not (policy.is_full or policy.joint or why_not(policy, self.abilities))
        return "" if is_of_use else self.refusal

    def reuses(self, policy: ReusePolicy, chunks: int) -> bool:
        """Whether an answer that brings so many chunks uses any that are stored."""
        if policy.is_full or self.yields(policy, chunks):
            return False
        return self.gate is None or not self.gate.objection(policy)

    def gated(self, policy: ReusePolicy, *, has_chunks: bool) -> tuple[ReusePolicy, str]:
        """The policy that the gate lets answer, and why it is another one, or "".

        Raises:
            InvalidInputError: If it is below what the gate lets through, and that refuses.
        """
        if self.gate is None:
            return policy, ""
        return self.gate.admitted(policy, has_chunks=has_chunks)

    def admitted(self, request: Request) -> Request:
        """The request as it is answered, where chunks cannot be moved."""
        brought = [len(one) - new for one, new in zip(request.rounds, request.fresh, strict=True)]
        if any(self.yields(request.policy, chunks) for chunks in brought):
            self.warn_refused()
            return request.by_full_prefill()
        return request

    def warn_refused(self) -> None:
        """Say, unless it was said, that this model answers by full prefill."""
        self._warn_once(
            f"{self.refusal}; it answers by full prefill, as with policy=FullRecompute()"
        )

    def warn_of_loss(self, request: Request) -> None:
        """Say, the first time, that a policy may cost answers; a chunk by itself is exact."""
        if not self.compares and any(len(chunks) > 1 for chunks in request.rounds):
            self._warn_once(reuse_warning(request.policy, trained=self.trained))

    def _warn_once(self, message: str) -> None:
        if message and message not in self.warned:
            self.warned.add(message)
            warnings.warn(message, stacklevel=_caller())


def _caller() -> int:
    """How many frames above the one that asks the app's own code is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    return level


def _default(model: Any, trained: bool, abilities: Abilities) -> ReusePolicy:
    """What a model is answered by that nobody says anything about."""
    # Where chunks cannot be moved, the few are read, whose first one stays where it was.
    width = 0 if abilities.cannot_stitch else hidden_size(model.config)
    return default_policy(trained=trained, width=width)
