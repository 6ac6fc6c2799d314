"""The public API: add chunks once, then prefill only the question to answer it."""

from __future__ import annotations

import copy
import os
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

import torch

from kvcache_rag.errors import (
    ChunkNotFoundError,
    ContextTooLongError,
    FingerprintMismatchError,
    InvalidInputError,
    NamedArguments,
    arguments_of,
    check_list,
    check_name,
    check_settings,
    refuse_unknown,
)
from kvcache_rag.generation import telemetry
from kvcache_rag.generation.bound import Bound, Planned, loader_of
from kvcache_rag.generation.context import checked_mode
from kvcache_rag.generation.explain import FEWEST_NEW, explained
from kvcache_rag.generation.gate import BoundGate, identity
from kvcache_rag.generation.joint import COMBINATION_BYTES
from kvcache_rag.generation.options import AnswerOptions, CompletionOptions, shows, without_none
from kvcache_rag.generation.policy_guard import PolicyGuard
from kvcache_rag.generation.prompt_memory import PromptMemory
from kvcache_rag.generation.question import ChunkInput, Question
from kvcache_rag.generation.request import (
    Asked,
    OtherLengthsError,
    RequestBuilder,
    checked_nats,
    listed_chunks,
    listed_keys,
    listed_questions,
    retrieved_chunks,
)
from kvcache_rag.generation.runner import Runner, cancelled_answer
from kvcache_rag.generation.stream import AnswerStream, AsyncAnswerStream, cancellable
from kvcache_rag.kv.chunk import ChunkKey
from kvcache_rag.kv.rotary import forget_scratch
from kvcache_rag.models.language import StoppedError, lock_of
from kvcache_rag.models.model_names import chosen_adapter
from kvcache_rag.models.pretrained import language_model, load
from kvcache_rag.models.weights import bare_model
from kvcache_rag.policies.base import with_auxiliary
from kvcache_rag.policies.policy_registry import given_policy
from kvcache_rag.prompt.renderer import PromptIds, PromptRenderer
from kvcache_rag.prompt.template import ChatArguments, Message, PromptTemplate
from kvcache_rag.stores import ChunkStore, MemoryStore
from kvcache_rag.stores.base import check_store

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from typing_extensions import Never, Self, Unpack

    from kvcache_rag.generation.context import RotationMode
    from kvcache_rag.generation.explain import Explained
    from kvcache_rag.generation.reading import Reading
    from kvcache_rag.generation.stream import Emit
    from kvcache_rag.metrics import Answer
    from kvcache_rag.models.weight_formats import WeightFormat
    from kvcache_rag.policies.base import ReusePolicy, Scorer
    from kvcache_rag.verdict import Gate, Identity, Verdict


_P = ParamSpec("_P")
_T = TypeVar("_T")

_FURTHER: Final = ("history", "scores", "asked")  # of a question of a batch, behind its chunks


class Engine(NamedArguments):
    """Answers questions over chunks whose keys and values were prefilled once.

    Calls may come from any thread; the model handles one at a time, even for several engines.

    Attributes:
        model: The transformers or PEFT model, as it was given.
        tokenizer: Its tokenizer.
        store: Where chunks are kept.
        combinations: Where chunks that were computed together are kept.
        template: How prompts are written.
        auxiliary: Scorer for policies that have none themselves, or None.
        namespace: Tenant; other namespaces never see its chunks.
        context_window: Longest prompt plus answer, in tokens.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        store: ChunkStore | None = None,
        combinations: ChunkStore | None = None,
        template: PromptTemplate | None = None,
        policy: ReusePolicy | str | None = None,
        namespace: str = "",
        context_window: int | None = None,
        packed_attention: bool = True,
        auxiliary: Scorer | None = None,
        gate: Gate | Verdict | str | os.PathLike[str] | None = None,
        rotation: RotationMode = "auto",
        prompt_memory: int | None = None,
        none_below: float | None = None,
    ) -> None:
        """Probe the model and bind the template.

        Args:
            model: A loaded transformers causal language model, on one device; or a PEFT model
                around it.
            tokenizer: Its tokenizer.
            store: Where chunks go; None for 1 GiB of memory.
            combinations: Where chunks computed together go (`Combination()`); None for 1 GiB of
                memory, `MemoryStore(0)` for nowhere.  With a separate store and limit they never
                push out single chunks.
            template: None for the default instruction.
            policy: A policy, or its name such as "cacheblend:0.2".  None for what the model was
                trained for: `Reuse()` if the model or its adapter says that it was fine-tuned for
                blocks, else `BestFew()`, or `BestLast(0.5)` if it is wide.  If the model cannot do
                what this default needs (`refusal`), a full prefill answers, with one warning.
                `LegoLink` cuts the chunks of a model with recurrent layers; engines with other
                policies do not find these.
            namespace: Tenant.
            context_window: See `EngineSettings`.
            packed_attention: Replace stock sdpa attention with an equal one that does not repeat
                keys and values.
            auxiliary: Scorer for policies that choose tokens by the question and have none
                themselves.  It runs in a thread while chunks load.
            gate: See `EngineSettings`; or a `Gate` or a `Verdict`.
            rotation: See `EngineSettings`.
            prompt_memory: See `EngineSettings`.
            none_below: See `EngineSettings`.
        """
        self._options = {**locals()}  # as they were given, for `like`
        del self._options["self"]
        check_settings(Engine.__init__, self._options)
        check_name("namespace", namespace)
        check_store("store", store)
        check_store("combinations", combinations)
        _check_parts(model, tokenizer, template)
        checked_mode(rotation)
        if prompt_memory is not None and prompt_memory < 0:
            raise InvalidInputError(f"prompt_memory must be a number of bytes, not {prompt_memory}")
        checked_nats(none_below)
        self._adapter = language_model(
            model, packed_attention=packed_attention, window=context_window
        )
        self.model, self.tokenizer = bare_model(model), tokenizer
        self.store = store if store is not None else MemoryStore()
        self.combinations = (
            combinations
            if combinations is not None
            else MemoryStore(COMBINATION_BYTES, tier="combinations")
        )
        self.template = template or PromptTemplate()
        guard = PolicyGuard.from_model(model, given_policy(policy), self._adapter.abilities)
        self._adapter.keep_heads(guard.policy.head)
        self.auxiliary = auxiliary
        self.namespace = namespace
        self.context_window = self._adapter.window(context_window)
        self._lock = lock_of(self._adapter.model)
        self._bound = self._bind(guard, longest=self._adapter.longest(context_window))
        telemetry.opened(self._adapter, self.store, rotation)

    def _bind(self, guard: PolicyGuard, longest: int) -> Bound:
        """Bind template and tokenizer to model and stores.

        Args:
            guard: Decides about policies, without a gate yet.
            longest: Longest prompt of a full prefill.
        """
        model, window = self._adapter, self.context_window
        renderer = PromptRenderer(self.template, self.tokenizer).in_namespace(self.namespace)
        loader = loader_of(model, self.store, self.combinations, renderer)
        beyond = model.why_no_longer(window, longest)
        none_below = self._options["none_below"]
        request_builder = RequestBuilder(renderer, None, window, longest, beyond, none_below)
        gate = self._options["gate"]
        if loader is not None and gate is not None:
            stores = (self.store, self.combinations)
            bound = BoundGate.from_gate(gate, loader.prefiller, renderer, stores, self.auxiliary)
            guard = replace(guard, gate=bound)
        with self._lock, model.computing():  # it may try out the model
            runner = Runner(
                model,
                renderer.encoder.tokenizer,
                renderer,
                loader,
                window,
                longest,
                self.auxiliary,
                self._options["rotation"],
                PromptMemory(model, self._options["prompt_memory"]),
            )
        return Bound.from_parts(runner, request_builder, self.tokenizer, guard)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        store: ChunkStore | None = None,
        template: PromptTemplate | None = None,
        dtype: torch.dtype | str = "auto",
        device: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        gguf_file: str | None = None,
        adapter: str | os.PathLike[str] | None = None,
        weight_format: WeightFormat = "auto",
        backend: str = "transformers",
        combinations: ChunkStore | None = None,
        policy: ReusePolicy | str | None = None,
        namespace: str = "",
        context_window: int | None = None,
        packed_attention: bool = True,
        auxiliary: Scorer | None = None,
        gate: Gate | Verdict | str | os.PathLike[str] | None = None,
        rotation: RotationMode = "auto",
        prompt_memory: int | None = None,
        none_below: float | None = None,
        **unknown: Never,
    ) -> Engine:
        """Load a model and make an engine for it.

        Args:
            name: See `model` of `EngineSettings`.
            store: Where chunks go.
            template: None for the one that comes with the model (`prompt_template.json`), else the
                default.
            dtype: See `EngineSettings`; a torch dtype works too.
            device: See `EngineSettings`.
            model_kwargs: See `EngineSettings`.
            tokenizer: A loaded tokenizer or its name; None for the model's own.
            gguf_file: Name of a GGUF file in that folder or hub repository.
            adapter: See `EngineSettings`.
            weight_format: See `EngineSettings`.
            backend: See `EngineSettings`.
            combinations: See `Engine`, as for all arguments below.
            policy: What is reused.
            namespace: Tenant.
            context_window: Longest prompt plus answer.
            packed_attention: Whether stock attention is replaced.
            auxiliary: Scores chunks.
            gate: Decides which policies may answer.
            rotation: When keys are rotated.
            prompt_memory: Bytes for the last prompts.
            none_below: Nats by which a chunk must make the question likelier.
            unknown: Refused.

        Raises:
            InvalidInputError: If the model cannot be loaded, or an argument is unknown.
        """
        # Before the model is loaded.
        known = arguments_of(cls.from_pretrained)
        refuse_unknown(unknown, known, f"argument of {cls.__name__}.from_pretrained")
        check_store("store", store)
        chosen = given_policy(policy)
        further = {**(model_kwargs or {}), **({"gguf_file": gguf_file} if gguf_file else {})}
        model, tokenizer, brought = load(
            name,
            dtype=dtype,
            device=device,
            options=further,
            tokenizer=tokenizer,
            adapter=chosen_adapter(name, adapter),
            weight_format=weight_format,
            backend=backend,
        )
        return cls(
            model,
            tokenizer,
            store=store,
            combinations=combinations,
            template=template or brought,
            policy=chosen,
            namespace=namespace,
            context_window=context_window,
            packed_attention=packed_attention,
            auxiliary=auxiliary,
            gate=gate,
            rotation=rotation,
            prompt_memory=prompt_memory,
            none_below=none_below,
        )

    def __copy__(self) -> Self:
        """Attributes of its own over the same model and stores."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """As `copy.copy`: neither a model nor a store is copied by accident."""
        return copy.copy(self)

    def __reduce__(self) -> NoReturn:
        """Refuse: a loaded model is not sent.

        Raises:
            InvalidInputError: Saying what can be.
        """
        raise InvalidInputError(
            "an engine holds a loaded model and cannot be pickled; make it where it is needed, or "
            "pickle what names its model, such as LocalSettings, a ChatKVCache or a KVCacheLLM"
        )

    def in_namespace(self, namespace: str) -> Self:
        """An engine for another tenant: the same model, stores and settings, but other chunks.

        The model is not probed again, and the call does not wait for it.  Both engines take turns.
        """
        other = copy.copy(self)
        other.namespace = check_name("namespace", namespace)
        other.auxiliary = _scorer_of(self.auxiliary, namespace)
        own = self.policy.auxiliary
        if own is not None:
            moved = other.auxiliary if own is self.auxiliary else _scorer_of(own, namespace)
            other.policy = with_auxiliary(self.policy, moved or own)
        other._bound = other._bound.in_namespace(namespace, other.auxiliary)
        return other

    def weights_changed(self) -> None:
        """Tell the engine that weights were written through `.data`, which it cannot notice itself.

        Before every question it notices PEFT's switching and merging, `load_state_dict`, optimisers
        and in-place operations.  After an unreported write through `.data`, answers mix the old and
        the new weights.
        """
        if self._bound.weights is not None:
            self._adapter.weights.written()

    def _follow(self, *, wait: bool = True) -> Bound:
        """Address chunks by the weights and the tokenizer as they are now.

        Args:
            wait: Whether to wait for the answer in progress; else it is left for the next call.

        Returns:
            Another one than before if they have changed: what was planned by that is planned anew.
        """
        if self._bound.is_current or not self._lock.acquire(blocking=wait):
            return self._bound
        try:
            self._bound = self._bound.followed(self.model)
            return self._bound
        finally:
            self._lock.release()

    @property
    def _reader(self) -> PromptRenderer:
        """The template with the tokenizer as it is now; weights are not looked at."""
        renderer = self._bound.renderer
        return renderer if renderer.is_current else self._follow().renderer

    @property
    def policy(self) -> ReusePolicy:
        """The policy of calls that name none."""
        return self._bound.guard.policy

    @policy.setter
    def policy(self, policy: ReusePolicy | str) -> None:
        self._guard(policy=given_policy(policy), is_default=False)

    def _guard(self, **changes: Any) -> None:
        """Have other things decided about policies."""
        guard = replace(self._bound.guard, **changes)
        self._bound = replace(self._bound, guard=guard)

    @property
    def gate(self) -> Gate | None:
        """Which policies may answer; None for all."""
        gate = self._bound.guard.gate
        return None if gate is None else gate.gate

    @property
    def refusal(self) -> str:
        """Why chunks of this model cannot be stitched, "" if they can."""
        return self._bound.guard.refusal

    @property
    def why_useless(self) -> str:
        """Why stored chunks do not help answers by the engine's policy; "" if they do.

        Even if chunks cannot be stitched, `BestFew` may take one from the store.
        """
        guard = self._follow().guard
        return guard.why_useless(guard.policy)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers of the model keep a state instead of keys and values."""
        return self._adapter.abilities.recompute == "heads"

    @property
    def prefix_text(self) -> str:
        """The text before the first chunk of every prompt."""
        return self._reader.prefix_text

    @property
    def spec(self) -> str:
        """Digest of everything about model and storage that cached chunks depend on."""
        return self._follow().capturing.spec

    @property
    def identity(self) -> Identity:
        """What a verdict of `kvcache-rag verify` must match to apply to this engine."""
        bound = self._follow()
        return identity(bound.capturing, bound.renderer)

    def keys(self, texts: Sequence[str]) -> list[ChunkKey]:
        """Keys of chunks, computed from their tokens; nothing is prefilled."""
        bound = self._follow()
        _ = bound.capturing
        return [chunk.key for chunk in bound.request_builder.chunks(texts)]

    def nbytes(self, key: ChunkKey) -> int:
        """Bytes of the keys and values of a chunk, as the model computes them."""
        return self._bound.capturing.layout.nbytes(key.tokens)

    def reference(self, digest: str, spec: str, tokens: int) -> ChunkKey:
        """Return the key of a chunk from its digest, spec and length, as noted elsewhere.

        Raises:
            FingerprintMismatchError: If it was made by another model, dtype, codec or prefix.
        """
        mine = self._bound.capturing
        key = ChunkKey(digest, spec, self.namespace, tokens, len(mine.prefix_ids))
        mismatch = self._bound.request_builder.mismatch(key)
        if mismatch:
            mismatch = self._follow().request_builder.mismatch(key)
        if mismatch:
            raise FingerprintMismatchError(mismatch)
        return key

    def needed(
        self,
        chunks: Sequence[ChunkInput],
        policy: ReusePolicy | str,
        scores: Sequence[float] | None = None,
        *,
        question: str = "",
    ) -> list[ChunkKey]:
        """Keys of the chunks that an answer over `chunks` will load; nothing is prefilled.

        Args:
            chunks: As for `generate`.
            policy: Policy of the answer.  A full prefill, or a policy that the gate replaces with
                it, loads nothing.
            scores: As for `generate`.
            question: The question, by which a policy may choose chunks.

        Returns:
            In prompt order.

        Raises:
            InvalidInputError: If a chunk cannot be used.
            ContextTooLongError: If one does not fit the context window.
        """
        bound = self._follow()
        _ = bound.capturing
        policy = given_policy(policy) or bound.guard.policy
        chunks = listed_chunks(chunks)
        needed = bound.request_builder.needs(policy, retrieved_chunks(question, chunks, scores))
        if not bound.guard.reuses(policy, len(needed)):
            return []
        planned = bound.request_builder.chunks(chunks, only=needed)
        if policy.joint and bound.joint is not None:
            planned = [*bound.joint.joined(planned)]
        return [chunk.key for chunk in planned]

    def add(
        self,
        texts: Sequence[str],
        *,
        show_progress: bool = False,
        cancelled: threading.Event | None = None,
    ) -> list[ChunkKey]:
        """Prefill and store the chunks that are not stored yet; nothing is computed twice.

        Auxiliary models of the engine and its policy prefill their own chunks of the same texts
        (`Auxiliary.prefill`).  `delete` does not reach these; their store evicts them by age.  What
        that store cannot keep is a miss for the next question (`Metrics.auxiliary_misses`).

        Args:
            texts: Chunks.
            show_progress: Whether to show a bar.
            cancelled: Once set, stops before the next batch.

        Returns:
            Their keys, in order.

        Raises:
            concurrent.futures.CancelledError: If it was stopped; what was computed stays stored.
            ContextTooLongError: If a chunk does not fit the context window; nothing is computed
                then.
            UnsupportedModelError: If the model keeps no keys and values per token.  If only its
                keys cannot be moved, the engine warns once, if the policy moves chunks
                (`why_useless`).
        """
        texts = check_list("chunks", texts, "texts")
        keys = self._add(texts, show_progress=show_progress, cancelled=cancelled)
        if self.auxiliary is not None or self.policy.auxiliary is not None:
            self._add_scored(texts, self.policy, show_progress=show_progress, cancelled=cancelled)
        return keys

    def _add(
        self,
        texts: Sequence[str],
        *,
        show_progress: bool,
        cancelled: threading.Event | None,
    ) -> list[ChunkKey]:
        """`add` without auxiliary models."""
        started = time.perf_counter()
        bound = self._follow()
        prefiller, guard = bound.capturing, bound.guard
        if guard.why_useless(guard.policy):
            guard.warn_refused()
        chunks = bound.request_builder.chunks(texts)
        if chunks:
            with self._lock:
                self._adapter.ensure_prefills()
                prefiller.prefix()
        with telemetry.added(self._adapter, chunks, started) as computed:
            computed.append(
                prefiller.fill(
                    chunks, guard=self._lock, show_progress=show_progress, cancelled=cancelled
                )
            )
        return list(map(attrgetter("key"), chunks))

    def _add_scored(
        self,
        texts: Sequence[str],
        policy: ReusePolicy,
        *,
        show_progress: bool = False,
        cancelled: threading.Event | None = None,
    ) -> None:
        """Let the scorers of the engine and of a policy prefill their own chunks, each once."""
        scorers = {id(one): one for one in (self.auxiliary, policy.auxiliary)}
        for scorer in scorers.values():
            ahead = getattr(scorer, "prefill", None)
            if ahead is not None:
                ahead(texts, show_progress=show_progress, cancelled=cancelled)

    def add_combination(
        self,
        combinations: Sequence[Sequence[ChunkInput]],
        *,
        show_progress: bool = False,
    ) -> list[ChunkKey]:
        """Prefill lists of chunks, each list together, for questions asked with `Combination()`.

        Args:
            combinations: Lists of chunks, each in prompt order.
            show_progress: Whether to show a bar.

        Returns:
            A key per list, in order; for a list of one chunk, the chunk's key.

        Raises:
            InvalidInputError: If a list is empty or a chunk cannot be used.
            ContextTooLongError: If a list does not fit the context window; nothing is computed
                then.
            UnsupportedModelError: If the model keeps no keys and values per token.
        """
        started = time.perf_counter()
        bound = self._follow()
        joint = bound.combining
        joined = joint.combined([bound.request_builder.chunks(chunks) for chunks in combinations])
        with self._lock:
            self._adapter.ensure_prefills()
        with telemetry.added(self._adapter, joined, started) as computed:
            computed.append(joint.fill(joined, self._lock, show_progress=show_progress))
        return [chunk.key for chunk in joined]

    def load_ahead(self, keys: Sequence[ChunkKey]) -> int:
        """Load chunks and combinations from slower tiers into the fastest one.

        The model is not needed.  Keys that no store has, or that are there already, are skipped.

        Returns:
            How many were loaded.
        """
        layout = self._bound.capturing.layout
        brought, wanted = 0, dict.fromkeys(listed_keys(keys))
        for store in dict.fromkeys([self.store, self.combinations]):
            fastest = getattr(store, "tiers", (store,))[0].tier
            for key in wanted:
                if store.locate(key) in (None, fastest):
                    continue
                with suppress(ChunkNotFoundError):  # gone, or damaged: the answer finds out
                    store.get(key, layout)
                    brought += 1
        return brought

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        """Drop chunks and combinations at once, and known combinations that contain such a chunk.

        A combination is known if this process used or computed it.  Later requests compute deleted
        chunks again.
        """
        gone = listed_keys(keys)
        for key in gone:
            self.store.delete(key)
            self.combinations.delete(key)
        if self._bound.joint is not None:
            self._bound.joint.forget(gone)

    def delete_namespace(self) -> int:
        """Drop every chunk and combination of this engine's namespace at once, in all tiers.

        Returns:
            How many chunks and combinations were dropped.

        Raises:
            OSError: If something could not be dropped.
        """
        with self._lock:
            bound = self._bound
            if bound.joint is not None:
                bound.joint.forget_all()
            bound.runner.forget()
            bound.renderer.forget()
            forget_scratch()
            stores = dict.fromkeys([self.combinations, self.store])
            return sum(store.delete_namespace(self.namespace) for store in stores)

    def forget_buffer(self) -> None:
        """Release the memory of the last prompts, which the next ones would reuse."""
        with self._lock:
            self._bound.runner.forget()
        forget = getattr(self.auxiliary, "forget_buffer", None)
        if forget is not None:
            forget()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Write chat messages as one prompt for `complete`, with the tokenizer's chat template.

        Args:
            messages: Each with `role` and `content`, and `tool_calls`, `name` and `tool_call_id`
                for tool calls, as chat templates read them.
            tools: Those the template describes, each `{"type": "function", "function": {...}}`.
            chat_template_kwargs: Values of its variables, such as `{"enable_thinking": False}`.

        Raises:
            InvalidInputError: If the template cannot write these messages.
        """
        arguments = ChatArguments.from_options(tools, chat_template_kwargs)
        return self._reader.render_chat(messages, arguments)

    def compose(self, write: Callable[[Callable[[str], str]], str]) -> str:
        """Write a prompt for `complete` with parts from users or documents.

        In these parts, literals of control tokens are text; elsewhere they are control tokens.
        Adding to the prompt later makes it an ordinary string, in which all literals are control
        tokens.

        Args:
            write: Writes the prompt, passing each such part through its argument; called several
                times.

        Raises:
            InvalidInputError: If the tokenizer cannot tell a literal from a control token.
        """
        return self._reader.compose(write)

    def tokenize(
        self,
        question: str,
        chunks: Sequence[str] = (),
        history: Sequence[Message | Mapping[str, Any]] = (),
    ) -> PromptIds:
        """Token ids of a prompt, exactly as every path uses them."""
        return self._reader.tokenize(question, chunks, history)

    def tokenize_text(self, prompt: str) -> tuple[int, ...]:
        """Token ids that `complete` continues; literals of control tokens are read as such.

        In a prompt from `render_chat`, literals inside messages are text.
        """
        return self._reader.text_ids(prompt)

    def brought_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a text from users or documents, to count or to cut it."""
        return self._reader.brought_ids(text)

    @shows(AnswerOptions)
    def generate(
        self, question: str, chunks: Sequence[ChunkInput] = (), **options: Unpack[AnswerOptions]
    ) -> Answer:
        """Answer a question over chunks.

        Args:
            question: Not empty.
            chunks: Texts, keys, or both (`StoredChunk`), best first.  The prompt has this order
                unless the policy changes it.
            options: See `AnswerOptions`; also further arguments of transformers' `generate()`.

        Raises:
            InvalidInputError: If an argument cannot be used.
            ContextTooLongError: If the prompt does not fit and `overflow` is "error".
            UnsupportedModelError: If the policy asked for moves chunks and the model's keys cannot
                move.  The default policy then gives way to a full prefill, with one warning.
        """
        emit, cancelled = options.pop("emit", None), options.pop("cancelled", None)
        asked = Question(question, listed_chunks(chunks), options)
        return self._answer([asked])(emit, cancelled)[0]

    @shows(AnswerOptions)
    def stream(
        self, question: str, chunks: Sequence[ChunkInput] = (), **options: Unpack[AnswerOptions]
    ) -> AnswerStream:
        """Like `generate`, as an iterator of pieces of text; its `metrics` are known at the end."""
        given = {**without_none(options), "streaming": True}
        return self._streamed(Question(question, listed_chunks(chunks), given))

    @shows(AnswerOptions)
    def generate_batch(
        self, questions: Sequence[Asked], **options: Unpack[AnswerOptions]
    ) -> list[Answer]:
        """Answer several questions in one padded batch; the answers equal single ones.

        Args:
            questions: For each a tuple: question, chunks, and optionally history, scores of the
                chunks, and `asked`.
            options: As for `generate`, the same for all; `overflow="refine"` is not possible here.
        """
        cancelled, given = options.pop("cancelled", None), without_none(options)
        asked = [
            Question(text, chunks, {**given, **dict(zip(_FURTHER, further, strict=False))})
            for text, chunks, *further in listed_questions(questions)
        ]
        return self._answer(asked, _planned_batch)(None, cancelled)

    @shows(CompletionOptions)
    def complete(self, prompt: str, **options: Unpack[CompletionOptions]) -> Answer:
        """Continue a text as it is, without template or chunks.

        Args:
            prompt: Not empty; the beginning-of-sequence token is added unless it is there.
            options: See `CompletionOptions`; also further arguments of transformers' `generate()`.
        """
        emit, cancelled = options.pop("emit", None), options.pop("cancelled", None)
        asked = Question(prompt, (), options, is_completion=True)
        return self._answer([asked])(emit, cancelled)[0]

    @shows(CompletionOptions)
    def stream_complete(self, prompt: str, **options: Unpack[CompletionOptions]) -> AnswerStream:
        """`complete`, as an iterator of pieces of text."""
        given = {**without_none(options), "streaming": True}
        return self._streamed(Question(prompt, (), given, is_completion=True))

    @shows(AnswerOptions)
    async def agenerate(
        self, question: str, chunks: Sequence[ChunkInput] = (), **options: Unpack[AnswerOptions]
    ) -> Answer:
        """`generate` in a thread; cancelling it stops generation at the next token."""
        return await cancellable(self.generate, question, chunks, **options)

    @shows(AnswerOptions)
    def astream(
        self, question: str, chunks: Sequence[ChunkInput] = (), **options: Unpack[AnswerOptions]
    ) -> AsyncAnswerStream:
        """`stream` as an async iterator."""
        return AsyncAnswerStream(lambda: self.stream(question, chunks, **options))

    @shows(CompletionOptions)
    async def acomplete(self, prompt: str, **options: Unpack[CompletionOptions]) -> Answer:
        """`complete` in a thread; cancelling it stops generation at the next token."""
        return await cancellable(self.complete, prompt, **options)

    @shows(CompletionOptions)
    def astream_complete(
        self, prompt: str, **options: Unpack[CompletionOptions]
    ) -> AsyncAnswerStream:
        """`stream_complete` as an async iterator."""
        return AsyncAnswerStream(lambda: self.stream_complete(prompt, **options))

    def explain(
        self,
        question: str,
        chunks: Sequence[ChunkInput] = (),
        *,
        policy: ReusePolicy | str | None = None,
        history: Sequence[Message | Mapping[str, str]] = (),
        scores: Sequence[float] | None = None,
        asked: str = "",
    ) -> Explained:
        """What `generate` would reuse and compute for this question now; no token is generated.

        A policy that chooses tokens needs the context loaded, so missing chunks are prefilled and
        stored, as by `generate`; so are chunks that are read first (`BestRead()`, `none_below`).
        Other policies (`Reuse()`, `FullRecompute()`, `Combination()`) compute and load nothing.  A
        damaged file counts as cached until it is read.

        Args:
            question: Not empty.
            chunks: As for `generate`.
            policy: A policy or its name; None for the engine's own.
            history: Earlier turns, oldest first.
            scores: As for `generate`.
            asked: As for `generate`.

        Raises:
            InvalidInputError: If an argument cannot be used.
            ContextTooLongError: If the prompt does not fit.
            ChunkNotFoundError: If only the key of a chunk is known and the store has lost it.
            UnsupportedModelError: If the policy moves chunks and the model's keys cannot move.
        """
        options: dict[str, Any] = {
            "policy": policy,
            "history": history,
            "max_new_tokens": FEWEST_NEW,
            "scores": scores,
            "asked": asked,
        }

        def run(bound: Bound, planned: Sequence[Planned]) -> Explained:
            (read,) = bound.read(planned)
            with torch.inference_mode():
                return explained(bound.runner, read.asked, read.request)

        return self._held([Question(question, listed_chunks(chunks), options)], run)()

    def read(
        self,
        question: str,
        chunks: Sequence[ChunkInput],
        *,
        cancelled: threading.Event | None = None,
    ) -> Reading:
        """How likely the question is after each chunk alone, to see which ones it may be about.

        This needs no retriever and no training.  A cached chunk costs the question's tokens; others
        are prefilled and stored first.

        Args:
            question: Not empty.
            chunks: As for `generate`.
            cancelled: Once set, stops reading.

        Raises:
            InvalidInputError: If an argument cannot be used.
            ContextTooLongError: If a chunk and the question do not fit the context window.
            ChunkNotFoundError: If only the key of a chunk is known and the store has lost it.
            concurrent.futures.CancelledError: If it was stopped.
        """
        bound, listed = self._follow(), listed_chunks(chunks)
        wanted = bound.to_read(question, listed)
        with self._turn() as now:
            again = wanted if now is bound else now.to_read(question, listed)
            try:
                with suppress(OtherLengthsError):
                    return now.reader.read(again, cancelled)
                return _read_by_text(now, Question(question, listed).by_text(), cancelled)
            except StoppedError as error:
                raise CancelledError from error

    def logits(
        self,
        question: str,
        chunks: Sequence[ChunkInput] = (),
        *,
        policy: ReusePolicy | str | None = None,
        answer_ids: Sequence[int] = (),
    ) -> Tensor:
        """Logits of the query's tokens over the stitched context, for checks.

        Args:
            question: Not empty.
            chunks: As for `generate`.
            policy: As for `explain`.
            answer_ids: Tokens of an answer, read after the query as part of it.

        Returns:
            `(query_tokens + len(answer_ids), vocabulary)` float32 on the CPU.
        """
        options = {"policy": policy, "max_new_tokens": 1 + len(answer_ids)}

        def run(bound: Bound, planned: Sequence[Planned]) -> Tensor:
            request = bound.read(planned)[0].request
            asked = replace(
                request, query=(*request.query, *answer_ids), answer_tokens=len(answer_ids)
            )
            prompt = bound.runner.prompt(asked, 0, "")
            keep = len(prompt.query) - prompt.fresh_tokens
            return bound.runner.logits([prompt], keep, as_answered=True)[0]

        return self._held([Question(question, listed_chunks(chunks), options)], run)()

    def _streamed(self, question: Question) -> AnswerStream:
        answer = self._answer([question])
        return AnswerStream(lambda emit, cancelled: answer(emit, cancelled)[0])

    def _answer(
        self,
        questions: Sequence[Question],
        plan: Callable[[Bound, Sequence[Question]], Sequence[Planned]] = Bound.plan_answers,
    ) -> Callable[[Emit | None, threading.Event | None], list[Answer]]:
        """Plan questions that are answered together; what is returned answers them."""

        def run(
            bound: Bound,
            planned: Sequence[Planned],
            emit: Emit | None,
            cancelled: threading.Event | None,
        ) -> list[Answer]:
            requests, runner = [one.request for one in planned], bound.runner
            with telemetry.watched(runner, requests) as answers:
                try:
                    requests = [one.request for one in bound.read(planned, cancelled)]
                except StoppedError:
                    answers += map(cancelled_answer, requests)
                    return answers
                if len(requests) == 1:
                    answers.append(runner.run(requests[0], emit, cancelled))
                else:
                    answers += runner.run_batch(requests, cancelled)
            return answers

        return self._held(questions, run, plan)

    def _held(
        self,
        questions: Sequence[Question],
        run: Callable[Concatenate[Bound, Sequence[Planned], _P], _T],
        plan: Callable[[Bound, Sequence[Question]], Sequence[Planned]] = Bound.plan,
    ) -> Callable[_P, _T]:
        """Plan questions now, so that mistakes are told at once; what is returned holds the model.

        What was planned is planned again, at most twice: if weights or tokenizer have changed
        while another answer was waited for, and by the texts of chunks if one is longer than its
        reference said.

        Args:
            questions: Answered together.
            run: Answers what was planned.
            plan: Plans it.
        """
        bound = self._follow()
        planned = plan(bound, questions)

        def answer(*given: _P.args, **named: _P.kwargs) -> _T:
            with self._turn() as now:
                try:
                    again = planned if now is bound else plan(now, questions)
                    return run(now, again, *given, **named)
                except OtherLengthsError:
                    again = plan(now, [question.by_text() for question in questions])
                    return run(now, again, *given, **named)

        return answer

    @contextmanager
    def _turn(self) -> Iterator[Bound]:
        """Hold the model; gives what answers by its weights as they are then.

        Raises:
            InvalidInputError: In a callback of an answer, whose context another would overwrite.
        """
        has_waited = not self._lock.acquire(blocking=False)
        if has_waited:
            self._lock.acquire()
        try:
            bound = self._follow() if has_waited else self._bound
            # Not as what the answer of another engine, whose callback asks this one, is computed.
            with self._adapter.by_itself(), self._adapter.answering(), self._adapter.computing():
                yield bound
        finally:
            self._lock.release()


def _read_by_text(bound: Bound, question: Question, cancelled: threading.Event | None) -> Reading:
    """A question behind chunks of which some are longer than their references said."""
    wanted = bound.to_read(question.text, question.chunks)
    try:
        return bound.reader.read(wanted, cancelled)
    except OtherLengthsError as error:
        raise ContextTooLongError(
            "a chunk is longer than its key says and does not fit the model's context window "
            "together with the question; pass its text instead of its key"
        ) from error


def _planned_batch(bound: Bound, questions: Sequence[Question]) -> list[Planned]:
    planned = bound.plan_answers(questions)
    if any(len(one.request.rounds) > 1 for one in planned):
        raise InvalidInputError('overflow="refine" needs several rounds; use generate for it')
    return planned


def like(engine: Engine, **changes: Any) -> Engine:
    """Another engine with the model, stores and options of `engine`, except `changes`.

    Args:
        engine: Its current attributes count; other options are as given.
        changes: Arguments of `Engine`; None for the default of an option.
    """
    options = {name: getattr(engine, name, value) for name, value in engine._options.items()}
    return Engine(**{**options, **changes})


def unwarned(engine: Engine) -> Engine:
    """The engine without warnings, for comparing policies on purpose."""
    other = copy.copy(engine)
    other._guard(compares=True)
    return other


def _check_parts(model: Any, tokenizer: Any, template: Any) -> None:
    """Refuse names where what they name is wanted, and what is missing."""
    if model is None or isinstance(model, (str, os.PathLike)):
        raise InvalidInputError(
            f"model must be a loaded model, not {model!r}; Engine.from_pretrained takes a name"
        )
    if not callable(getattr(tokenizer, "decode", None)):
        raise InvalidInputError(f"tokenizer must be the model's tokenizer, not {tokenizer!r:.80}")
    if not isinstance(template, PromptTemplate | None):
        raise InvalidInputError(
            f"template must be a PromptTemplate, not {template!r:.80}; "
            "PromptTemplate(instruction) takes a text"
        )


def _scorer_of(scorer: Scorer | None, namespace: str) -> Scorer | None:
    """A scorer for another tenant, if it stores anything."""
    moving = getattr(scorer, "in_namespace", None)
    return scorer if moving is None else moving(namespace)
