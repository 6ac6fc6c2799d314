"""Which policy answers a question, and who is told once that another one does."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvcache_rag.models.adapters import hidden_size, trained_for_blocks
from kvcache_rag.policies import FullRecompute
from kvcache_rag.policies.default import default_policy, reuse_warning

if TYPE_CHECKING:
    from kvcache_rag.generation.gate import BoundGate
    from kvcache_rag.generation.request import Request
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.prefill import Prefiller
    from kvcache_rag.prompt.renderer import PromptRenderer

# Of the frames between a warning and who called the engine.
_STACK = 5


@dataclass(frozen=True)
class Admission:
    """What decides about the policy of a request.

    Attributes:
        trained: Whether the model was trained for blocks.
        default: The policy that nobody insists on, None if one was given: it follows the adapters,
            and yields to full prefill on a model that is refused.
        refusal: Why chunks of the model cannot be stitched, "" if they can.
        alone: Chunks of a prompt that stay where they were, which even a refused model reuses: 1,
            or 0 if it keeps nothing.
        gate: Lets policies through; None for all.
        compares: Whether policies are compared, and so each asked for on purpose.
        warned: What was said already, by all engines made of one.
    """

    trained: bool
    default: ReusePolicy | None
    refusal: str
    alone: int = 1
    gate: BoundGate | None = None
    compares: bool = False
    warned: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls, model: Any, given: ReusePolicy | None, refusal: str
    ) -> tuple[ReusePolicy, Admission]:
        """The policy of an engine whose adapters are as they are now, and what decides.

        Args:
            model: As transformers or PEFT has it.
            given: The policy that was asked for, or None.
            refusal: See above.
        """
        trained = trained_for_blocks(model)
        policy = given or _default(model, trained, refusal)
        return policy, cls(trained, None if given else policy, refusal)

    def following(self, model: Any, policy: ReusePolicy) -> tuple[ReusePolicy, Admission]:
        """The policy of an engine and what decides, after adapters may have been switched."""
        trained = trained_for_blocks(model)
        if policy is not self.default:
            return policy, replace(self, trained=trained)
        policy = _default(model, trained, self.refusal)
        return policy, replace(self, trained=trained, default=policy)

    def rebound(self, prefiller: Prefiller, renderer: PromptRenderer) -> Admission:
        """After weights or the tokenizer changed."""
        if self.gate is None:
            return self
        return replace(self, gate=self.gate.rebound(prefiller, renderer))

    def yields(self, policy: ReusePolicy) -> bool:
        """Whether full prefill answers instead of a policy where chunks would have to move."""
        return bool(self.refusal) and policy is self.default

    def why_useless(self, policy: ReusePolicy) -> str:
        """Why storing chunks is of no use to answers by a policy, "" if it is of use."""
        return self.refusal if policy.moves_chunks or not self.alone else ""

    def reuses(self, policy: ReusePolicy, chunks: int) -> bool:
        """Whether an answer that brings so many chunks uses any that are stored."""
        if policy.is_full or (self.yields(policy) and chunks > self.alone):
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
        brought = (request.policy.arranged(scores).brought for scores in request.scores)
        must_move = any(len(one) > self.alone for one in brought)
        if must_move and self.yields(request.policy):
            self.warn_refused()
            return replace(request, policy=FullRecompute())
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
            warnings.warn(message, stacklevel=_STACK)


def _default(model: Any, trained: bool, refusal: str) -> ReusePolicy:
    """What a model is answered by that nobody says anything about."""
    # Where chunks cannot be moved, the few are read, whose first one stays where it was.
    return default_policy(trained=trained, width=0 if refusal else hidden_size(model.config))
