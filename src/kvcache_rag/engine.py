"""The public face: add chunks once, then answer questions that only prefill the question."""

from __future__ import annotations

import copy
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kvcache_rag.errors import (
    ChunkNotFoundError,
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
from kvcache_rag.generation.admission import Admission
from kvcache_rag.generation.answer import Answerer, Asked
from kvcache_rag.generation.context import checked_mode
from kvcache_rag.generation.explain import FEWEST_NEW, explained
from kvcache_rag.generation.gate import BoundGate, identity
from kvcache_rag.generation.joint import COMBINATION_BYTES, Combinations
from kvcache_rag.generation.options import AnswerOptions, CompletionOptions, shows, without_none
from kvcache_rag.generation.request import (
    ChunkInput,
    OtherLengthsError,
    Planner,
    Request,
    by_text,
    listed_chunks,
    listed_keys,
    listed_questions,
    retrieved_chunks,
)
from kvcache_rag.generation.stream import AnswerStream, AsyncAnswerStream, cancellable
from kvcache_rag.kv.chunk import ChunkKey
from kvcache_rag.kv.rotary import forget_scratch
from kvcache_rag.models.language import lock_of
from kvcache_rag.models.names import chosen_adapter
from kvcache_rag.models.pretrained import language_model, load
from kvcache_rag.models.weights import bare_model
from kvcache_rag.policies.base import with_auxiliary
from kvcache_rag.policies.named import given_policy
from kvcache_rag.prefill import Prefiller
from kvcache_rag.prompt.renderer import PromptIds, PromptRenderer
from kvcache_rag.prompt.template import ChatArguments, Message, PromptTemplate
from kvcache_rag.stitching.loader import ContextLoader
from kvcache_rag.stores import ChunkStore, MemoryStore
from kvcache_rag.stores.base import check_store

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from typing_extensions import Never, Self, Unpack

    from kvcache_rag.generation.context import RotationMode
    from kvcache_rag.generation.explain import Explained
    from kvcache_rag.generation.stream import Emit
    from kvcache_rag.metrics import Answer
    from kvcache_rag.models.linears import WeightFormat
    from kvcache_rag.models.pretrained import Backend
    from kvcache_rag.policies.base import ReusePolicy, Scorer
    from kvcache_rag.verdict import Gate, Identity, Verdict


class Engine(NamedArguments):
    """Answers questions over chunks whose keys and values were prefilled once.

    Calls may come from any thread; the model works on one at a time, also for several engines.

    Attributes:
        model: The transformers or PEFT model, as it was given.
        tokenizer: Its tokenizer.
        store: Where chunks are kept.
        combinations: Where chunks that were computed together are kept.
        template: How prompts are written.
        policy: What is reused when a call does not say.
        auxiliary: Scores chunks for policies that bring no scorer of their own, or None.
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
    ) -> None:
        """Measure the model and bind the template.

        Args:
            model: A loaded transformers causal language model, on one device; or a PEFT model
                around it.
            tokenizer: Its tokenizer.
            store: Where chunks go; None for 1 GiB of memory.
            combinations: Where chunks go that were computed together (`Combination()`); None for 1
                GiB of memory, `MemoryStore(0)` for nowhere.  A store of their own, with a limit of
                its own, lets them never push out single chunks.
            template: None for the default instruction.
            policy: What is reused, or the name of that, such as "cacheblend:0.2"; None for what the
                model was trained for: `Reuse()` if it, or its adapter, says that it was fine-tuned
                for blocks, else `BestFew()`, or `BestLast(0.5)` if it is wide; where that needs
                what the model cannot do (`refusal`) its chunks are then answered by full prefill,
                with one warning.  `LegoLink` cuts the chunks of a model with recurrent layers,
                which others do not find then.
            namespace: Tenant.
            context_window: As `EngineSettings`.
            packed_attention: Replace stock sdpa attention by an equal one that does not repeat keys
                and values.
            auxiliary: Scores chunks for policies that choose tokens by a question and bring no
                scorer of their own, in a thread beside the loading.
            gate: As `EngineSettings`; or a `Gate` or a `Verdict`.
            rotation: As `EngineSettings`.
        """
        self._options = {**locals()}  # as they were given, for `like`
        del self._options["self"]
        check_settings(Engine.__init__, self._options)
        check_name("namespace", namespace)
        check_store("store", store)
        check_store("combinations", combinations)
        _check_parts(model, tokenizer, template)
        checked_mode(rotation)
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
        self.policy, self._admission = Admission.of(
            model, given_policy(policy), self._adapter.why_refused
        )
        self._adapter.keep_heads(self.policy.head)
        self.auxiliary = auxiliary
        self.namespace = namespace
        self.context_window = self._adapter.window(context_window)
        self._lock = lock_of(self._adapter.model)
        self._changes = 0
        self._bind()
        # A model without a prefiller keeps no keys and values: nothing of it can be reused.
        if self._prefiller is None:
            self._admission = replace(self._admission, alone=0)
        elif gate is not None:
            stores = (self.store, self.combinations)
            bound = BoundGate.of(gate, self._prefiller, self._renderer, stores, auxiliary)
            self._admission = replace(self._admission, gate=bound)
        telemetry.opened(self._adapter, self.store, rotation)

    def _bind(self) -> None:
        """Bind template and tokenizer, as it reads texts now, to model and stores."""
        longest = self._adapter.longest(self._options["context_window"])  # without cached chunks
        renderer = PromptRenderer(self.template, self.tokenizer)
        self._renderer = renderer.in_namespace(self.namespace)
        joint = self._loader(self.combinations, None)
        loader = self._loader(self.store, joint)
        self._prefiller = loader.prefiller if loader else None
        self._joint = Combinations(loader, joint, self.context_window) if loader and joint else None
        self._planner = Planner(
            self._renderer,
            self._prefiller,
            self.context_window,
            longest,
            self._adapter.why_no_longer(self.context_window, longest),
        )
        # What the chunks are addressed by; a model without a prefiller has none.
        self._weights = None if loader is None else self._adapter.weights.identity
        with self._lock, self._adapter.computing():  # it may try out the model
            self._answerer = Answerer(
                self._adapter,
                self._renderer.encoder.tokenizer,
                self._renderer,
                loader,
                self.context_window,
                longest,
                self.auxiliary,
                self._options["rotation"],
            )

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
        backend: Backend = "transformers",
        combinations: ChunkStore | None = None,
        policy: ReusePolicy | str | None = None,
        namespace: str = "",
        context_window: int | None = None,
        packed_attention: bool = True,
        auxiliary: Scorer | None = None,
        gate: Gate | Verdict | str | os.PathLike[str] | None = None,
        rotation: RotationMode = "auto",
        **unknown: Never,
    ) -> Engine:
        """Load a model and make an engine for it.

        Args:
            name: As `model` of `EngineSettings`.
            store: Where chunks go.
            template: None for the one the model brings along (`prompt_template.json`), else the
                default.
            dtype: As `EngineSettings`.
            device: As `EngineSettings`.
            model_kwargs: As `EngineSettings`.
            tokenizer: A loaded one, or the name of one; None for the model's own.
            gguf_file: Name of a GGUF file in that folder or on the hub.
            adapter: As `EngineSettings`.
            weight_format: As `EngineSettings`.
            backend: As `EngineSettings`.
            combinations: As `Engine`; so are the others behind it.
            policy: What is reused.
            namespace: Tenant.
            context_window: Longest prompt plus answer.
            packed_attention: Whether stock attention is replaced.
            auxiliary: Scores chunks.
            gate: Lets policies through.
            rotation: When keys are rotated.
            unknown: None there are.

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
        )

    def _loader(
        self, store: ChunkStore, combinations: ContextLoader | None
    ) -> ContextLoader | None:
        prefiller = Prefiller.of(self._adapter, store, self._renderer.prefix_ids, self.namespace)
        if prefiller is None:
            return None
        return ContextLoader(prefiller, self._renderer, combinations)

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
        """An engine for another tenant: the same model, stores and settings, other chunks.

        Nothing is measured anew, and nothing waits for the model, which works for one at a time.
        """
        other = copy.copy(self)
        other.namespace = check_name("namespace", namespace)
        other.auxiliary = _scorer_of(self.auxiliary, namespace)
        own = self.policy.auxiliary
        if own is not None:
            moved = other.auxiliary if own is self.auxiliary else _scorer_of(own, namespace)
            other.policy = with_auxiliary(self.policy, moved or own)
        answerer, loader = self._answerer, self._answerer.loader
        other._renderer = self._renderer.in_namespace(namespace)
        other._planner = replace(self._planner, renderer=other._renderer)
        if loader is not None:
            joint = loader.combinations and _moved(loader.combinations, namespace)
            loader = replace(_moved(loader, namespace), combinations=joint)
            other._prefiller = loader.prefiller
            other._planner = replace(other._planner, prefiller=loader.prefiller)
            window = self._planner.window
            other._joint = None if joint is None else Combinations(loader, joint, window)
        other._answerer = Answerer(
            self._adapter,
            answerer.tokenizer,
            other._renderer,
            loader,
            answerer.window,
            answerer.longest,
            other.auxiliary,
            self._options["rotation"],
        )
        return other

    def weights_changed(self) -> None:
        """Say that weights of the model were written through `.data`, which nothing else tells.

        PEFT's switching and merging, `load_state_dict`, optimisers and in-place operations are
        noticed by themselves, before every question.  After a write through `.data` that is not
        told of, answers mix the old and the new weights.
        """
        if self._weights is not None:
            self._adapter.weights.written()

    def _follow(self, *, wait: bool = True) -> int:
        """Address chunks by the weights and the tokenizer as they are now.

        Args:
            wait: Whether to wait for the answer in progress; else it is left for the next call.

        Returns:
            How often they have changed: what was planned at another number is planned anew.
        """
        if self._is_current() or not self._lock.acquire(blocking=wait):
            return self._changes
        try:
            before = self._changes
            if not self._renderer.is_current:
                self._bind()
                self._changes += 1
            if self._weights is not None:
                weights = self._adapter.weights.follow()
                if weights is not self._weights:
                    self._weights = weights
                    self._follow_weights()
                    self._changes += 1
            if self._changes != before and self._prefiller is not None:
                self._admission = self._admission.rebound(self._prefiller, self._renderer)
            return self._changes
        finally:
            self._lock.release()

    def _follow_weights(self) -> None:
        loader = self._answerer.loader
        for part in (loader, loader.combinations) if loader else ():
            if part is not None:
                part.prefiller.follow_weights()
        self.policy, self._admission = self._admission.following(self.model, self.policy)

    @property
    def _reader(self) -> PromptRenderer:
        """The template with the tokenizer as it is now."""
        if not self._renderer.is_current:
            self._follow()
        return self._renderer

    def _is_current(self) -> bool:
        weights = self._adapter.weights
        return self._renderer.is_current and (
            self._weights is None or (weights.are_unchanged() and weights.identity is self._weights)
        )

    @property
    def gate(self) -> Gate | None:
        """Which policies are let through; None for all."""
        return None if self._admission.gate is None else self._admission.gate.gate

    @property
    def refusal(self) -> str:
        """Why chunks of this model cannot be stitched, "" if they can."""
        return self._admission.refusal

    @property
    def why_useless(self) -> str:
        """Why storing chunks is of no use to answers by the engine's policy, "" if it is of use.

        What cannot be stitched may still be the one chunk that `BestFew` takes from the store.
        """
        self._follow()
        return self._admission.why_useless(self.policy)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers of the model keep a state instead of keys and values."""
        return self._adapter.recurrent is not None

    @property
    def prefix_text(self) -> str:
        """What stands before the first chunk of every prompt."""
        return self._reader.prefix_text

    @property
    def spec(self) -> str:
        """Digest of everything about model and storage that cached chunks depend on."""
        self._follow()
        return self._capturing.spec

    @property
    def identity(self) -> Identity:
        """What a verdict of `kvcache-rag verify` about this engine is about."""
        self._follow()
        return identity(self._capturing, self._planner.renderer)

    def keys(self, texts: Sequence[str]) -> list[ChunkKey]:
        """Addresses of chunks, computed from their tokens; nothing is prefilled."""
        _ = self._capturing
        self._follow()
        return [chunk.key for chunk in self._planner.chunks(texts)]

    def nbytes(self, key: ChunkKey) -> int:
        """Bytes of the keys and values of a chunk, as the model computes them."""
        return self._capturing.layout.nbytes(key.tokens)

    def reference(self, digest: str, spec: str, tokens: int) -> ChunkKey:
        """The key of a chunk whose digest, spec and length were noted elsewhere.

        Raises:
            FingerprintMismatchError: If it was made by another model, dtype, codec or prefix.
        """
        mine = self._capturing
        key = ChunkKey(digest, spec, self.namespace, tokens, len(mine.prefix_ids))
        mismatch = self._planner.mismatch(key)
        if mismatch:
            self._follow()
            mismatch = self._planner.mismatch(key)
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
        """Addresses of what an answer over `chunks` will load; nothing is prefilled.

        Args:
            chunks: As for `generate`.
            policy: What will be reused; of a full prefill, or one that the gate replaces by it,
                nothing is.
            scores: As for `generate`.
            question: By which a policy may choose among the chunks.

        Returns:
            In prompt order.

        Raises:
            InvalidInputError: If a chunk cannot be used.
            ContextTooLongError: If one does not fit the context window.
        """
        policy = given_policy(policy) or self.policy
        _ = self._capturing
        self._follow()
        chunks = listed_chunks(chunks)
        brought = policy.brought(retrieved_chunks(question, chunks, scores))
        if not self._admission.reuses(policy, len(brought)):
            return []
        planned = self._planner.chunks(chunks, only=brought)
        if policy.joint and self._joint is not None:
            planned = [*self._joint.joined(planned)]
        return [chunk.key for chunk in planned]

    def add(
        self,
        texts: Sequence[str],
        *,
        show_progress: bool = False,
        cancelled: threading.Event | None = None,
    ) -> list[ChunkKey]:
        """Prefill and store what is not stored yet; nothing is computed twice.

        Auxiliary models (of the engine, of its policy) prefill their own chunks of the same texts
        (`Auxiliary.prefill`).  `delete` does not reach these: their store evicts them by their age.
        What such a store cannot keep is a miss when a question comes (`Metrics.auxiliary_misses`).

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
            UnsupportedModelError: If the model keeps no keys and values per token.  One whose keys
                cannot be moved warns, once, where the policy moves chunks (`why_useless`).
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
        self._follow()
        prefiller = self._prefiller or self._capturing  # which says why there is none
        if self._admission.why_useless(self.policy):
            self._admission.warn_refused()
        chunks = self._planner.chunks(texts)
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
            combinations: Chunks of each, in the order in which they will stand in the prompt.
            show_progress: Whether to show a bar.

        Returns:
            Their keys, in order; a list of one chunk is that chunk.

        Raises:
            InvalidInputError: If a list is empty or a chunk cannot be used.
            ContextTooLongError: If a list does not fit the context window; nothing is computed
                then.
            UnsupportedModelError: If the model keeps no keys and values per token.
        """
        started = time.perf_counter()
        _ = self._capturing
        if self._joint is None:
            raise InvalidInputError("this model keeps no keys and values")
        self._follow()
        joined = self._joint.combined([self._planner.chunks(chunks) for chunks in combinations])
        with self._lock:
            self._adapter.ensure_prefills()
        with telemetry.added(self._adapter, joined, started) as computed:
            computed.append(self._joint.fill(joined, self._lock, show_progress=show_progress))
        return [chunk.key for chunk in joined]

    def load_ahead(self, keys: Sequence[ChunkKey]) -> int:
        """Bring chunks and combinations out of slower tiers into the fastest one.

        The model is not needed for it; what is nowhere, or is there already, is left alone.

        Returns:
            How many were brought.
        """
        layout = self._capturing.layout
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
        """Drop chunks and combinations at once, and the combinations of which such a chunk is part.

        Whoever asks for one again has it computed again.
        """
        gone = listed_keys(keys)
        for key in gone:
            self.store.delete(key)
            self.combinations.delete(key)
        if self._joint is not None:
            self._joint.forget(gone)

    def delete_namespace(self) -> int:
        """Drop every chunk and combination of this engine's namespace at once, in all tiers.

        Returns:
            How many chunks and combinations were dropped.

        Raises:
            OSError: If something could not be dropped.
        """
        with self._lock:
            if self._joint is not None:
                self._joint.forget_all()
            self._answerer.buffer.forget()
            self._renderer.forget()
            forget_scratch()
            stores = dict.fromkeys([self.combinations, self.store])
            return sum(store.delete_namespace(self.namespace) for store in stores)

    def forget_buffer(self) -> None:
        """Release the memory of the last prompt, which the next one would have used again."""
        with self._lock:
            self._answerer.buffer.forget()
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
        """Chat messages as one prompt for `complete`, by the tokenizer's chat template.

        Args:
            messages: Each with `role` and `content`; as chat templates read them, with
                `tool_calls`, `name` and `tool_call_id` where tools are called.
            tools: That the template describes, each `{"type": "function", "function": {...}}`.
            chat_template_kwargs: Values of its variables, such as `{"enable_thinking": False}`.

        Raises:
            InvalidInputError: If the template cannot write these messages.
        """
        arguments = ChatArguments.of(tools, chat_template_kwargs)
        return self._reader.render_chat(messages, arguments)

    def compose(self, write: Callable[[Callable[[str], str]], str]) -> str:
        """A prompt for `complete` of which users or documents brought parts.

        Literals of control tokens are text in these parts, and control tokens elsewhere.  Whatever
        is added to the prompt afterwards makes it an ordinary text again, all literals in it
        control tokens.

        Args:
            write: Writes the prompt, with each brought part as its argument gives it; called
                several times.

        Raises:
            InvalidInputError: If the tokenizer cannot tell a literal from a control token.
        """
        return self._reader.compose(write)

    def tokenize(
        self, question: str, chunks: Sequence[str] = (), history: Sequence[Message] = ()
    ) -> PromptIds:
        """The very ids that every path uses."""
        return self._reader.tokenize(question, chunks, history)

    def tokenize_text(self, prompt: str) -> tuple[int, ...]:
        """The ids that `complete` continues, literals of control tokens read as such.

        In what `render_chat` wrote, those that a message brought are text.
        """
        return self._reader.text_ids(prompt)

    def brought_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a text of users or documents by itself, to count or to cut it."""
        return self._reader.brought_ids(text)

    @shows(AnswerOptions)
    def generate(
        self, question: str, chunks: Sequence[ChunkInput] = (), **options: Unpack[AnswerOptions]
    ) -> Answer:
        """Answer a question over chunks.

        Args:
            question: Not empty.
            chunks: Texts, keys, or both (`StoredChunk`), best first; they stand in this order,
                unless the policy has another.
            options: As `AnswerOptions` has them, and further arguments of transformers'
                `generate()`.

        Raises:
            InvalidInputError: If an argument cannot be used.
            ContextTooLongError: If the prompt does not fit and `overflow` is "error".
            UnsupportedModelError: If a policy that was asked for moves chunks and the model's keys
                cannot move; without one it answers by full prefill, with one warning.
        """
        emit, cancelled = options.pop("emit", None), options.pop("cancelled", None)
        chunks = listed_chunks(chunks)
        changes = self._follow()
        request = self._asked(question, chunks, options)
        with self._turn(changes) as is_changed:
            if is_changed:
                request = self._asked(question, chunks, options)
            try:
                return self._answered(request, emit, cancelled)
            except OtherLengthsError:
                request = self._asked(question, by_text(chunks), options)
                return self._answered(request, emit, cancelled)

    @shows(AnswerOptions)
    def stream(
        self, question: str, chunks: Sequence[ChunkInput] = (), **options: Unpack[AnswerOptions]
    ) -> AnswerStream:
        """Like `generate`, as an iterator of pieces of text; its `metrics` are known at the end."""
        given, chunks = {**without_none(options), "streaming": True}, listed_chunks(chunks)
        changes = self._follow()
        request = self._asked(question, chunks, given)

        def run(emit: Emit, cancelled: threading.Event) -> Answer:
            with self._turn(changes) as is_changed:
                now = self._asked(question, chunks, given) if is_changed else request
                try:
                    return self._answered(now, emit, cancelled)
                except OtherLengthsError:
                    now = self._asked(question, by_text(chunks), given)
                    return self._answered(now, emit, cancelled)

        return AnswerStream(run)

    @shows(AnswerOptions)
    def generate_batch(
        self, questions: Sequence[Asked], **options: Unpack[AnswerOptions]
    ) -> list[Answer]:
        """Answer several questions in one padded batch; equals the single answers.

        Args:
            questions: Question and chunks of each, then, as far as it has them, its history, the
                scores of its chunks, and what is asked (`asked`).
            options: As for `generate`, the same for all; `overflow="refine"` is not possible here.
        """
        cancelled = options.pop("cancelled", None)
        given, questions = without_none(options), listed_questions(questions)
        changes = self._follow()
        requests = self._batch(questions, given)
        if any(len(request.rounds) > 1 for request in requests):
            raise InvalidInputError('overflow="refine" needs several rounds; use generate for it')
        with self._turn(changes) as is_changed:
            if is_changed:
                requests = self._batch(questions, given)
            try:
                return self._all_answered(requests, cancelled)
            except OtherLengthsError:
                asked = [(text, by_text(chunks), *more) for text, chunks, *more in questions]
                return self._all_answered(self._batch(asked, given), cancelled)

    def _batch(self, questions: Sequence[Asked], options: Mapping[str, Any]) -> list[Request]:
        requests = [
            self._asked(
                question,
                chunks,
                {**options, **dict(zip(("history", "scores", "asked"), more, strict=False))},
            )
            for question, chunks, *more in questions
        ]
        if not self.refusal:
            return requests
        # A batch is answered under one policy, and one full prefill makes the others full.
        full = next((one.policy for one in requests if one.policy.is_full), None)
        return [replace(one, policy=full or one.policy) for one in requests]

    @shows(CompletionOptions)
    def complete(self, prompt: str, **options: Unpack[CompletionOptions]) -> Answer:
        """Continue a text as it is, without template and chunks.

        Args:
            prompt: Not empty; the beginning-of-sequence token is added unless it is there.
            options: As `CompletionOptions` has them, and further arguments of transformers'
                `generate()`.
        """
        emit, cancelled = options.pop("emit", None), options.pop("cancelled", None)
        changes = self._follow()
        request = self._planner.completion(prompt, **options)
        with self._turn(changes) as is_changed:
            if is_changed:
                request = self._planner.completion(prompt, **options)
            return self._answered(request, emit, cancelled)

    @shows(CompletionOptions)
    def stream_complete(self, prompt: str, **options: Unpack[CompletionOptions]) -> AnswerStream:
        """`complete`, as an iterator of pieces of text."""
        given: dict[str, Any] = {**without_none(options), "streaming": True}
        changes = self._follow()
        request = self._planner.completion(prompt, **given)

        def run(emit: Emit, cancelled: threading.Event) -> Answer:
            with self._turn(changes) as is_changed:
                now = self._planner.completion(prompt, **given) if is_changed else request
                return self._answered(now, emit, cancelled)

        return AnswerStream(run)

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

        A policy that chooses tokens has the context loaded to choose from, so chunks that are
        missing are prefilled and stored, as `generate` would.  With others (`Reuse()`,
        `FullRecompute()`, `Combination()`) nothing is computed or loaded.  A damaged file counts as
        cached until it is read.

        Args:
            question: Not empty.
            chunks: As for `generate`.
            policy: What to reuse, or the name of that; None for the engine's own.
            history: Earlier turns, oldest first.
            scores: As for `generate`.
            asked: As for `generate`.

        Raises:
            InvalidInputError: If an argument cannot be used.
            ContextTooLongError: If the prompt does not fit.
            ChunkNotFoundError: If only the key of a chunk is known and the store has lost it.
            UnsupportedModelError: If the policy moves chunks and the model's keys cannot move.
        """
        chunks, changes = listed_chunks(chunks), self._follow()
        options: dict[str, Any] = {
            "history": history,
            "max_new_tokens": FEWEST_NEW,
            "scores": scores,
            "asked": asked,
        }

        def planned(chunks: Sequence[ChunkInput]) -> tuple[Request, Request]:
            return self._planned(question, chunks, {**options, "policy": policy})

        requests = planned(chunks)
        with self._turn(changes) as is_changed, torch.inference_mode():
            if is_changed:
                requests = planned(chunks)
            try:
                return explained(self._answerer, *requests)
            except OtherLengthsError:
                return explained(self._answerer, *planned(by_text(chunks)))

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
            answer_ids: Tokens of an answer, read behind the query as part of it.

        Returns:
            `(query_tokens + len(answer_ids), vocabulary)` float32 on the CPU.
        """
        options = {"policy": policy, "max_new_tokens": 1 + len(answer_ids)}
        chunks, changes = listed_chunks(chunks), self._follow()

        def planned(chunks: Sequence[ChunkInput]) -> Request:
            request = self._request(question, chunks, options)
            query = (*request.query, *answer_ids)
            return replace(request, query=query, answer_tokens=len(answer_ids))

        request = planned(chunks)
        with self._turn(changes) as is_changed:
            if is_changed:
                request = planned(chunks)
            try:
                return self._answerer.logits(self._answerer.prompt(request, 0, ""))
            except OtherLengthsError:
                request = planned(by_text(chunks))
                return self._answerer.logits(self._answerer.prompt(request, 0, ""))

    @property
    def _capturing(self) -> Prefiller:
        if self._prefiller is None:
            _ = self._adapter.measured  # raises UnsupportedModelError with the layer and the reason
            raise InvalidInputError("this model keeps no keys and values")
        return self._prefiller

    def _request(
        self, question: str, chunks: Sequence[ChunkInput], options: Mapping[str, Any]
    ) -> Request:
        return self._planned(question, chunks, options)[1]

    def _asked(
        self, question: str, chunks: Sequence[ChunkInput], options: Mapping[str, Any]
    ) -> Request:
        """A request that is answered, with a warning the first time that it may cost answers."""
        request = self._request(question, chunks, options)
        self._admission.warn_of_loss(request)
        return request

    def _planned(
        self, question: str, chunks: Sequence[ChunkInput], options: Mapping[str, Any]
    ) -> tuple[Request, Request]:
        """What is let be answered, with the chunks one by one and as the policy wants."""
        wanted = given_policy(options.get("policy")) or self.policy
        policy, note = self._admission.gated(wanted, has_chunks=bool(chunks))
        request = self._planner.request(question, chunks, **{**options, "policy": policy})
        request = self._admission.admitted(replace(request, gate=note))
        if self._joint is None or not request.policy.joint:
            return request, request
        return request, self._joint.arranged(request)

    @contextmanager
    def _turn(self, changes: int) -> Iterator[bool]:
        """Hold the model; gives whether more has changed than when it was planned (`_follow`).

        Raises:
            InvalidInputError: In a callback of an answer, whose context another would overwrite.
        """
        has_waited = not self._lock.acquire(blocking=False)
        if has_waited:
            self._lock.acquire()
        try:
            is_changed = (self._follow() if has_waited else self._changes) != changes
            with self._adapter.answering(), self._adapter.computing():
                yield is_changed
        finally:
            self._lock.release()

    def _answered(
        self, request: Request, emit: Emit | None, cancelled: threading.Event | None
    ) -> Answer:
        """Answer a request by the model, which is held."""
        with telemetry.watched(self._answerer, [request]) as answers:
            answers.append(self._answerer.run(request, emit, cancelled))
        return answers[0]

    def _all_answered(
        self, requests: Sequence[Request], cancelled: threading.Event | None
    ) -> list[Answer]:
        """The same of several in one batch."""
        with telemetry.watched(self._answerer, requests) as answers:
            answers += self._answerer.run_batch(requests, cancelled)
        return answers


def like(engine: Engine, **changes: Any) -> Engine:
    """Another engine with the model, the stores and the options of `engine`, but for `changes`.

    Args:
        engine: Its attributes count as they are now; what it does not show, as it was given.
        changes: Arguments of `Engine`; None for the default of an option.
    """
    options = {name: getattr(engine, name, value) for name, value in engine._options.items()}
    return Engine(**{**options, **changes})


def unwarned(engine: Engine) -> Engine:
    """The engine for who compares policies, and so asks for each of them on purpose."""
    other = copy.copy(engine)
    other._admission = replace(engine._admission, compares=True)
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


def _moved(loader: ContextLoader, namespace: str) -> ContextLoader:
    """A loader of the same store for another tenant."""
    return replace(
        loader,
        prefiller=loader.prefiller.in_namespace(namespace),
        renderer=loader.renderer.in_namespace(namespace),
    )


def _scorer_of(scorer: Scorer | None, namespace: str) -> Scorer | None:
    """A scorer for another tenant, if it stores anything."""
    moving = getattr(scorer, "in_namespace", None)
    return scorer if moving is None else moving(namespace)
