"""The contexts of a batch of prompts: copied into one buffer, attended to in place, or computed.

What a policy asks for is done by a `ContextBuilder`, in `buffered.py` or llama.cpp's `contexts.py`:
load, stitch, choose tokens, compute them again.  Who runs the model sees a `Context` and never asks
where it lies.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvcache_rag.errors import ChunkNotFoundError, InvalidInputError
from kvcache_rag.models.generate import uses_beams
from kvcache_rag.policies.signals import ChunkScores
from kvcache_rag.prompt.offsets import chunk_text
from kvcache_rag.stitching.loader import LoadedContext
from kvcache_rag.stitching.stitch import StitchedPrompt, StitchedRow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kvcache_rag.generation.prompt_memory import Beginning, PromptMemory
    from kvcache_rag.generation.request import Request
    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.models.language import LanguageModel
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.prefill import ContextChunk
    from kvcache_rag.stitching.loader import ContextLoader

RotationMode = Literal["auto", "copied", "deferred"]
"""`copied`: keys are copied and rotated; `deferred`: chunks stay where they lie, and the query is
rotated instead; `auto`: `deferred` for chunks that attention reads in 8 bits, else `copied`."""

Rotation = Literal["", "copied", "deferred"]
"""What became of a context; "" for none, as of a full prefill."""


@dataclass(frozen=True)
class Prompt:
    """Chunks and query of one prompt, and how to answer it.

    Attributes:
        chunks: Those whose keys and values are brought, in prompt order.
        query: Ids of what is computed behind them: chunks that the policy wants computed there,
            then history and question.
        request: What the caller asked for.
        fresh: The chunks at the beginning of the query.
        may_continue: Whether it may start behind what another prompt left of its query.
    """

    chunks: tuple[ContextChunk, ...]
    query: tuple[int, ...]
    request: Request
    fresh: tuple[ContextChunk, ...] = ()
    may_continue: bool = True

    @property
    def fresh_tokens(self) -> int:
        """Tokens of the chunks in the query."""
        return sum(map(len, self.fresh))

    @property
    def has_documents(self) -> bool:
        """Whether anything stands before history and question."""
        return bool(self.chunks or self.fresh)

    def question_start(self, ids: Sequence[int] | Tensor) -> int:
        """Where history and question begin in the ids of the whole prompt."""
        return len(ids) - len(self.query) + self.fresh_tokens

    @property
    def places(self) -> tuple[int, ...]:
        """Numbers of all its chunks, as they were given."""
        each = (chunk.places or (chunk.place,) for chunk in (*self.chunks, *self.fresh))
        return tuple(chain.from_iterable(each))

    @property
    def policy(self) -> ReusePolicy:
        """What becomes of the chunks that are brought."""
        return self.request.policy


@dataclass(frozen=True, eq=False)
class ContextRow:
    """One prompt of a batch, and what bringing its context cost.

    Attributes:
        ids: `(tokens,)` int64 of the whole prompt, on the CPU.
        shape: The prompt's spans; in a full prefill all of it is the query.
        loaded: What finding the chunks gave and cost, and where they lie if they stay there.
        policy: What selected for this prompt.
        stitched: Where its context was copied to; None where it was not.
        selected: `(context_tokens,)` bool, tokens to be computed again; None for none.
        choosing: Seconds for choosing them.
        recomputing: Seconds for computing them again, 0 before that.
        recomputed_tokens: How many were; 0 before that.
        scorer_misses: Chunks that a scorer had to prefill first.
        heard_query: Whether the choice was made by what the query asks (`RowSignals.heard_query`).
        is_copy: Whether all that was done for another row of the batch.
        is_advanced: Whether the query but its last token was computed by itself.
        continued: First tokens of the query whose keys and values the last prompt left.
    """

    ids: Tensor
    shape: StitchedPrompt
    loaded: LoadedContext
    policy: ReusePolicy
    stitched: StitchedRow | None = None
    selected: Tensor | None = None
    choosing: float = 0.0
    recomputing: float = 0.0
    recomputed_tokens: int = 0
    scorer_misses: int = 0
    heard_query: bool = False
    is_copy: bool = False
    is_advanced: bool = False
    continued: int = 0

    @property
    def missing(self) -> int:
        """Last tokens of the prompt that generating has to compute.

        The query, or what the last prompt left open of it; its last token, once tokens were
        computed again and the query with them.
        """
        row = self.stitched
        at_once = row is None or row.model.abilities.recompute == "tokens"
        is_computed = self.selected is not None and not self.is_copy and at_once
        is_query = not self.is_advanced and not is_computed
        open_ = self.shape.tokens - self.shape.context_tokens - self.continued
        return open_ if is_query else 1

    @property
    def steps(self) -> dict[str, float]:
        """Seconds of what was done for it from `loaded.begun` on, one behind the other."""
        return {
            "load": self.loaded.load,
            "stitch": self.loaded.stitch,
            "choose": self.choosing,
            "recompute": self.recomputing,
        }

    @property
    def costs(self) -> dict[str, Any]:
        """What it adds to `Metrics`."""
        loaded = self.loaded
        return {
            **self.steps,
            "reused_tokens": loaded.reused_tokens,
            "prefilled_tokens": loaded.prefilled_tokens,
            "hits": loaded.hits,
            "misses": loaded.misses,
            "missed": loaded.missed,
            "recomputed_tokens": self.recomputed_tokens,
            "auxiliary_misses": self.scorer_misses,
            "continued_tokens": self.continued,
            "policy": repr(self.policy),
        }

    @property
    def can_be_copied(self) -> bool:
        """Whether a row with the same chunks would hold the same, at the same cost."""
        return not (self.heard_query or "relevance" in self.policy.reads or self.loaded.misses)


@dataclass(frozen=True, eq=False)
class Context:
    """What stands before the queries of one batch of prompts: nothing, if everything is computed.

    A row's context ends where its query begins, so index = position + padding everywhere and
    windows stay right.

    Attributes:
        model: The model.
        rows: One per prompt.
        rotation: Where the contexts lie: `copied` side by side in the buffer, left-padded;
            `deferred` where the store keeps them (LazyAttention, arXiv 2606.04302: one copy of a
            chunk serves any prompt at any position), and the buffer is for what follows; "" for
            none, as prompts are computed as they are.
        not_deferred: Why keys were copied instead of attended to where they lie.
    """

    model: LanguageModel
    rows: Sequence[ContextRow]
    rotation: Rotation = ""
    not_deferred: str = ""

    def cache(self, missing: Sequence[int]) -> Any:  # nothing is held
        """A transformers cache of one left-padded batch; None where everything is computed.

        Args:
            missing: Last tokens of each prompt that the forward pass will compute.
        """
        return None

    def attended(self) -> AbstractContextManager[object]:
        """What forward passes run in, with the attention that they need in force.

        Raises:
            UnsupportedModelError: On entering, if the policy weighs chunks and the model cannot.
        """
        return nullcontext()

    def leave(
        self, answers: Sequence[Sequence[int]], cache: Any, *, is_cut: bool
    ) -> None:  # nothing is held
        """Let the next prompt begin with what was computed for this one.

        Args:
            answers: Ids that were generated for each prompt, one behind the other.
            cache: What they were generated with.
            is_cut: Whether they were cancelled, perhaps in the middle of a pass.
        """

    def costs(self, row: int) -> dict[str, Any]:
        """What the context of one prompt adds to its `Metrics`."""
        return {
            **self.rows[row].costs,
            "rotation": self.rotation,
            "not_deferred": self.not_deferred,
        }


def checked_mode(mode: RotationMode) -> RotationMode:
    """The mode; raises `InvalidInputError` if it is none."""
    if mode not in ("auto", "copied", "deferred"):
        raise InvalidInputError(f'rotation must be "auto", "copied" or "deferred", not {mode!r}')
    return mode


class ContextBuilder(ABC):
    """Brings the contexts of prompts for one engine.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        loader: Loads chunks, or computes them.
        memory: Of prompts.
        auxiliary: Scores chunks for policies that bring no scorer of their own.
        rotation: What the caller wants.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,
        loader: ContextLoader,
        memory: PromptMemory,
        auxiliary: Scorer | None,
        rotation: RotationMode,
    ) -> None:
        """Fill buffers of `memory`, or what the model has in place of these."""
        self.model, self.tokenizer, self.loader = model, tokenizer, loader
        self.memory, self.auxiliary, self.rotation = memory, auxiliary, rotation

    def build(self, prompts: Sequence[Prompt]) -> Context:
        """Bring the contexts of a batch, of one or more prompts whose requests are alike.

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more.
            UnsupportedModelError: If chunks would have to move and the model's keys cannot.
            InvalidInputError: If the policy needs a scorer and there is none, or selects nonsense.
        """
        try:
            return self._build(prompts)
        except ChunkNotFoundError:
            # A reference has gone, or was not what it said: its text is what counts.
            return self._build(
                [
                    replace(prompt, chunks=tuple(map(self.loader.from_text, prompt.chunks)))
                    for prompt in prompts
                ]
            )

    def computed(self, rows: Sequence[ContextRow], request: Request, documents: int = 0) -> Context:
        """Prompts of which everything is computed.

        Args:
            rows: The prompts.
            request: Theirs, which are alike.
            documents: First tokens of the only one, on which the model's adapter for questions does
                not act; 0 where it acts on none.
        """
        return Context(self.model, rows)

    @abstractmethod
    def _build(self, prompts: Sequence[Prompt]) -> Context:
        """`build`, once."""

    # ------------------------------------------------------------------ prompts that go on

    def _beginning(self, prompt: Prompt) -> Beginning | None:
        """What the context of a prompt is made of; None if the next one cannot go on from it."""
        policy = prompt.policy
        if (
            not prompt.may_continue
            or not policy.is_reuse
            or policy.scaling is not None
            or uses_beams(prompt.request.options)  # which repeat and reorder rows
        ):
            return None
        keys = tuple((chunk.key, chunk.is_joint) for chunk in prompt.chunks)
        # Where an adapter for questions begins to act.
        fresh = prompt.fresh_tokens if self.model.question_adapter else 0
        return self._own, keys, policy.positions, policy.adjacent_query, fresh

    def _computed_beginning(self, documents: int) -> Beginning:
        """Of prompts of which everything is computed; `documents` as for `computed`."""
        return "computed", self._own, documents

    @property
    def _own(self) -> ChunkKey:
        """What names tenant, prefix and weights, also where there is no chunk to say it."""
        return self.loader.prefiller.key(())

    def _context_tokens(self, prompt: Prompt) -> int:
        chunks = sum(chunk.key.tokens for chunk in prompt.chunks)
        return len(self.loader.prefiller.prefix_ids) + chunks

    def _continued_row(self, prompt: Prompt, kept: Sequence[int], known: int) -> ContextRow | None:
        """A prompt of which `known` ids are there already; None if they end before its query.

        Args:
            prompt: Its context is that of the other one.
            kept: Ids of the other one, its context and what may be behind it.
            known: How many of both are alike.
        """
        context, started = self._context_tokens(prompt), time.perf_counter()
        if known < context:
            return None
        tiers = self.loader.for_chunks(prompt.chunks).tiers(prompt.chunks)
        if not all(tiers):  # deleted, or evicted: it is computed and stored again
            return None
        loaded = LoadedContext(
            tuple(kept[:context]),
            load=time.perf_counter() - started,
            hits=dict(Counter(tiers)),
            reused_tokens=context - len(self.loader.prefiller.prefix_ids),
            begun=started,
        )
        whole, shape = self._joined(prompt, loaded)
        return ContextRow(whole, shape, loaded, prompt.policy, continued=known - context)

    def _stores_as_computed(self, prompt: Prompt) -> bool:
        return self.loader.for_chunks(prompt.chunks).prefiller.stores_as_computed

    @abstractmethod
    def choose(self, prompt: Prompt) -> ContextRow:
        """Load the context of a prompt and choose tokens; none is computed again."""

    def _joined(self, prompt: Prompt, loaded: LoadedContext) -> tuple[Tensor, StitchedPrompt]:
        chunks = [chunk.key.tokens for chunk in prompt.chunks]
        shape = StitchedPrompt.from_sizes(len(loaded.ids) - sum(chunks), chunks, len(prompt.query))
        return torch.tensor([*loaded.ids, *prompt.query]), shape  # (tokens,) int64

    def _scoring(
        self, policy: ReusePolicy, question: str, chunks: Sequence[ContextChunk]
    ) -> ChunkScores | None:
        if "relevance" not in policy.reads or not chunks:
            return None
        scorer = policy.auxiliary or self.auxiliary
        if scorer is None:
            raise InvalidInputError(
                f"{policy} needs an auxiliary model to choose tokens; give one to the policy or to "
                "Engine(auxiliary=...)"
            )
        template = self.loader.renderer.template
        texts = [
            chunk_text(self.tokenizer, template, self.loader.ids(chunk))
            if chunk.text is None  # known by its key alone
            else chunk.text
            for chunk in chunks
        ]
        return ChunkScores.start(scorer, question, texts, template, self.tokenizer)
