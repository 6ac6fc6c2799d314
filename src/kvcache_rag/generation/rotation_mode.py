"""Copy the chunks of a prompt and turn their keys, or attend to them where they lie?

Copying costs time per byte, once.  Attending in place costs a kernel's call per chunk, layer and
token, which on a CPU is soon more.  Both are measured; what cannot be deferred says why.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.deferred.support import deferral_refusal, segment_seconds
from kvcache_rag.models.generate import uses_beams
from kvcache_rag.stitching.costs import Timings
from kvcache_rag.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.generation.context import Prompt
    from kvcache_rag.metrics import Metrics
    from kvcache_rag.stitching.loader import ContextLoader
    from kvcache_rag.stores import ChunkStore


RotationMode = Literal["auto", "copied", "deferred"]
"""`copied`: keys are copied and turned; `deferred`: the query is turned instead; `auto`: whichever
is sooner by what was measured, copying until something was."""

# Answers whose copying is looked back at, and how large a context must be to be worth a thought:
# below, copying takes a few milliseconds, and what was measured is mostly other work.
COPIES = 7

SMALLEST = 32 << 20


class Deferral:
    """Decides for one engine.  Not thread-safe: used by whoever holds the model.

    Attributes:
        mode: What the caller wants.
        loader: Knows model and stores.
    """

    def __init__(self, mode: RotationMode, loader: ContextLoader) -> None:
        """Know no rate yet; with `deferred` the model is tried out now, not by a question.

        Raises:
            InvalidInputError: If `mode` is none of the three.
        """
        self.mode, self.loader = checked_mode(mode), loader
        self._copies = Timings(COPIES)
        if mode == "deferred":
            deferral_refusal(loader.prefiller.model)

    def why_copied(self, prompts: Sequence[Prompt]) -> str:
        """Why the chunks of a batch have to be copied, or ""."""
        if self.mode == "copied":
            return 'the engine was made with rotation="copied"'
        request = prompts[0].request
        if request.policy.scaling is not None:
            return f"{request.policy!r} weighs chunks against the rest"
        if not request.policy.is_reuse:
            return f"{request.policy!r} computes tokens again"
        if uses_beams(request.options):
            return "beam search repeats and reorders rows"
        for prefiller in (self._loader(prompt).prefiller for prompt in prompts):
            if prefiller.position == "raw":
                codec = prefiller.store.codec.name
                return (
                    f"codec {codec} keeps every key at position 0, and one angle turns one distance"
                )
        sooner = self._why_sooner(prompts) if self.mode == "auto" else ""
        return sooner or deferral_refusal(self.loader.prefiller.model)

    def answered(self, prompt: Prompt, metrics: Metrics) -> None:
        """Note what copying took for one prompt, if all of it lay in memory."""
        nbytes, seconds = self._nbytes(prompt), metrics.load + metrics.stitch
        tiers = {one.tier for one in _memory_tiers(self._loader(prompt).prefiller.store)}
        from_memory = {*metrics.hits} <= tiers and not metrics.prefilled_tokens
        if metrics.rotation == "copied" and from_memory and seconds and nbytes >= SMALLEST:
            self._copies.note(nbytes, seconds)

    def _loader(self, prompt: Prompt) -> ContextLoader:
        joint = any(chunk.is_joint for chunk in prompt.chunks)
        return (self.loader.combinations if joint else None) or self.loader

    def _nbytes(self, prompt: Prompt) -> int:
        tokens = len(self.loader.prefiller.prefix_ids) + sum(map(len, prompt.chunks))
        return self.loader.prefiller.model.measured.chunk_layout.nbytes(tokens)

    def _why_sooner(self, prompts: Sequence[Prompt]) -> str:
        """Why copying is sooner, or ""."""
        nbytes = sum(map(self._nbytes, prompts))
        megabytes = f"{nbytes / 1e6:.3g} MB"
        if nbytes < SMALLEST:
            return f"copying {megabytes} is a matter of milliseconds"
        for prompt in prompts:
            # Not `locate`, which would ask slower tiers too.
            tiers = _memory_tiers(self._loader(prompt).prefiller.store)
            if not all(any(one.contains(chunk.key) for one in tiers) for chunk in prompt.chunks):
                return "not all chunks lie in this process's memory; others are read into place"
        rate = self._copies.rate()
        if rate is None:
            return "no context of this size was copied yet, so nothing is known to compare with"
        model = self.loader.prefiller.model
        segments = sum(1 + len(prompt.chunks) for prompt in prompts)
        tokens = 1 + prompts[0].request.max_new_tokens
        calls = segment_seconds(model) * segments * len(model.measured.kinds) * tokens
        if not math.isfinite(calls):
            return deferral_refusal(model) or "no kernel knows the shapes of its attention"
        copying = rate * nbytes
        if copying > calls:
            return ""
        return (
            f"copying {megabytes} is sooner here: {copying:.2g} s against {calls:.2g} s more for "
            f"{tokens} tokens over {segments} chunks"
        )


def checked_mode(mode: RotationMode) -> RotationMode:
    """The mode; raises `InvalidInputError` if it is none."""
    if mode not in ("auto", "copied", "deferred"):
        raise InvalidInputError(f'rotation must be "auto", "copied" or "deferred", not {mode!r}')
    return mode


def _memory_tiers(store: ChunkStore) -> list[MemoryStore]:
    """The tiers that are memory of this process."""
    tiers = getattr(store, "tiers", (store,))
    return [one for one in tiers if isinstance(one, MemoryStore)]
