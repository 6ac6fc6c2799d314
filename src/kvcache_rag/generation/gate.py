"""The gate: a policy answers only where a verdict says that it is good enough on this model.

Otherwise the question is answered by `FullRecompute()`, with the reason in the metrics, or refused.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcache_rag.codecs import Native
from kvcache_rag.errors import FingerprintMismatchError, InvalidInputError
from kvcache_rag.kv.chunk import canonical_json, digest
from kvcache_rag.policies import FullRecompute
from kvcache_rag.verdict import Gate, Identity, Verdict

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.prefill import Prefiller
    from kvcache_rag.prompt.renderer import PromptRenderer
    from kvcache_rag.stores import ChunkStore


_LOG = logging.getLogger(__name__)

_told: set[str] = set()

# Written into the template to see how it writes; any text would do.
_PROBES = ("Where is it?", "In the first place.")


def identity(prefiller: Prefiller, renderer: PromptRenderer) -> Identity:
    """What a verdict on this model, prefix, template and storage is about."""
    description, adapter = prefiller.description, prefiller.model.question_adapter
    # Its chunks are those of the model without it, and its answers are not.
    with_adapter, behind = (f" with adapter {adapter[:12]}", f"+{adapter}") if adapter else ("", "")
    return Identity(
        model=f"{description.get('model')}{with_adapter}",
        revision=f"{description.get('revision')}{behind}",
        codec=str(description.get("codec")),
        dtype=_dtype(description),
        prefix=str(description.get("prefix_digest")),
        template=template_digest(renderer),
        spec=f"{prefiller.spec}{behind}",
    )


def template_digest(renderer: PromptRenderer) -> str:
    """Of how chunks and questions are written."""
    question, text = _PROBES
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    written = {
        "chunk": renderer.chunk_ids(text),
        "query": renderer.query_ids(question),
        "with_history": renderer.query_ids(question, turns),
        "again": renderer.query_ids(question, answer=text),
    }
    return digest("kvcache-rag-template", canonical_json(written))[:16]


@dataclass(frozen=True)
class BoundGate:
    """A gate of an engine.

    Attributes:
        gate: The setting.
        verdict: Its verdict, which is about this engine.
        auxiliary: The engine's own scorer.
        exact_combinations: Whether chunks computed together are stored without loss.
        stale: Why the verdict is not about the weights as they are now, or "".
    """

    gate: Gate
    verdict: Verdict
    auxiliary: Scorer | None
    exact_combinations: bool
    stale: str = ""

    @classmethod
    def from_gate(
        cls,
        setting: Gate | Verdict | str | os.PathLike[str],
        prefiller: Prefiller,
        renderer: PromptRenderer,
        stores: Sequence[ChunkStore],
        auxiliary: Scorer | None,
    ) -> BoundGate:
        """Read the verdict and compare it with the engine.

        Args:
            setting: A gate, a verdict or the path of one.
            prefiller: Knows model, prefix and codec.
            renderer: Writes prompts.
            stores: Of chunks and of combinations.
            auxiliary: The engine's own scorer.

        Raises:
            InvalidInputError: If it cannot be read, or is none.
            FingerprintMismatchError: If it is about another model, template or codec.
        """
        gate = setting if isinstance(setting, Gate) else Gate(setting)
        verdict = gate.loaded()
        verdict.identity.ensure_same(identity(prefiller, renderer))
        exact = all(store.codec.name == Native.name for store in stores)
        return cls(gate, verdict, auxiliary, exact)

    def rebound(self, prefiller: Prefiller, renderer: PromptRenderer) -> BoundGate:
        """The gate after weights changed: it objects to all policies until they are back."""
        try:
            self.verdict.identity.ensure_same(identity(prefiller, renderer))
        except FingerprintMismatchError as error:
            return replace(self, stale=str(error))
        return replace(self, stale="")

    def objection(self, policy: ReusePolicy) -> str:
        """Why a policy does not pass, or ""; what equals a full prefill always passes."""
        if policy.is_full:
            return ""
        if policy.joint and self.exact_combinations:
            return ""
        if self.stale:
            return self.stale
        auxiliary = ""
        if "relevance" in policy.reads:
            auxiliary = scorer_name(policy.auxiliary or self.auxiliary)
        return self.verdict.objection(policy_key(policy), self.gate.threshold, auxiliary)

    def admitted(self, policy: ReusePolicy, *, has_chunks: bool) -> tuple[ReusePolicy, str]:
        """The policy, or what answers instead of it, and why.

        Raises:
            InvalidInputError: If it is below and the gate refuses.
        """
        reason = self.objection(policy)
        if not reason:
            return policy, ""
        if self.gate.below == "error" and has_chunks:
            raise InvalidInputError(f"{reason}; use FullRecompute() or another policy")
        # Without chunks nothing is lost and there is nothing to report; the policy is replaced all
        # the same, because a batch is answered under one policy.
        note = f"fell back to FullRecompute(): {reason}" if has_chunks else ""
        if note:
            _LOG.log(logging.DEBUG if note in _told else logging.WARNING, "%s", note)
            _told.add(note)
        return FullRecompute(), note


def _dtype(told: Mapping[str, Any]) -> str:
    computed, kept = (str(told.get(name)) for name in ("compute_dtype", "stored_dtype"))
    both = computed if computed == kept else f"{computed}, kept as {kept}"
    return both.replace("torch.", "")


def policy_key(policy: ReusePolicy) -> str:
    """What names a policy in a verdict: its `repr` without the auxiliary, which is named apart."""
    written = repr(policy)
    return written if policy.auxiliary is None else written.replace(repr(policy.auxiliary), "None")


def scorer_name(scorer: Scorer | None) -> str:
    """Name of an auxiliary model, the same in every process; "" for none.

    Model and revision where it has an engine, else its attribute `name`, else its class.
    """
    engine_identity = getattr(getattr(scorer, "engine", None), "identity", None)
    if isinstance(engine_identity, Identity):
        return f"{engine_identity.model}@{engine_identity.revision[:12]}"
    return "" if scorer is None else str(getattr(scorer, "name", type(scorer).__qualname__))
