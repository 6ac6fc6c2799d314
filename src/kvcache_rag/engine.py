"""The public face: add chunks once, then answer questions that only prefill the question."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvcache_rag.aio import AsyncMethods
from kvcache_rag.answering import Answerer
from kvcache_rag.batching import Asked, answer_batch
from kvcache_rag.combination import COMBINATION_BYTES, Combinations
from kvcache_rag.context import ContextLoader
from kvcache_rag.costs import Costs
from kvcache_rag.deferral import checked_mode
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.explaining import ExplainMethods
from kvcache_rag.gate import BoundGate
from kvcache_rag.loading import load
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.models.switching import lock_of
from kvcache_rag.policies import Reuse, ReusePolicy
from kvcache_rag.prefill import Prefiller
from kvcache_rag.prompt import PromptIds, PromptRenderer
from kvcache_rag.request import ChunkInput, Planner, Request
from kvcache_rag.stores import ChunkStore, MemoryStore
from kvcache_rag.storing import StoreMethods
from kvcache_rag.streaming import AnswerStream, Emit
from kvcache_rag.template import Message, PromptTemplate

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from kvcache_rag.deferral import RotationMode
    from kvcache_rag.metrics import Answer
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.verdict import Gate, Verdict


class Engine(StoreMethods, ExplainMethods, AsyncMethods):
    """Answers questions over chunks whose keys and values were prefilled once.

    Calls may come from any thread; the model works on one at a time, also for several engines.

    Attributes:
        model: The transformers model.
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
        policy: ReusePolicy | None = None,
        namespace: str = "",
        prefill_dtype: torch.dtype | None = None,
        context_window: int | None = None,
        packed_attention: bool = True,
        cost_aware: bool = True,
        auxiliary: Scorer | None = None,
        gate: Gate | Verdict | str | os.PathLike[str] | None = None,
        rotation: RotationMode = "auto",
    ) -> None:
        """Measure the model and bind the template.

        Args:
            model: A loaded transformers causal language model, on one device.
            tokenizer: Its tokenizer.
            store: Where chunks go; None for 1 GiB of memory.
            combinations: Where chunks go that were computed together (`Combination()`); None for 1
                GiB of memory, `MemoryStore(0)` for nowhere.  A store of their own, with a limit of
                its own, lets them never push out single chunks.
            template: None for the default instruction.
            policy: None for `Reuse()`.
            namespace: Tenant.
            prefill_dtype: Compute chunks in this dtype (offline cost only); `torch.float32` stores
                keys and values of a bfloat16 model more than twice as close to exact, at the same
                size.
            context_window: Lower it to keep prompts short; None for the model's own.
            packed_attention: Replace stock sdpa attention by an equal one that does not repeat keys
                and values.
            cost_aware: Prefill a cached chunk again where measured rates say that this is sooner
                than loading it (a slow remote tier); off, whatever is cached is loaded.
            auxiliary: Scores chunks for policies that choose tokens by a question and bring no
                scorer of their own, in a thread beside the loading.
            gate: What `kvcache-rag verify` wrote: a policy that is not good enough on this model
                is replaced by `FullRecompute()`, with the reason in the metrics (see `Gate`).
            rotation: "deferred" attends to chunks where they lie in memory, without a copy per
                answer (on a GPU: in `MemoryStore(device=...)`), or `Metrics.not_deferred` says why
                not; "copied" never does; "auto" where it is measured sooner.
        """
        checked_mode(rotation)
        self._adapter = TransformersModel(model, packed_attention=packed_attention)
        self.model, self.tokenizer = model, tokenizer
        self.store = store if store is not None else MemoryStore()
        self.combinations = (
            combinations
            if combinations is not None
            else MemoryStore(COMBINATION_BYTES, tier="combinations")
        )
        self.template = template or PromptTemplate()
        self.policy: ReusePolicy = policy or Reuse()
        self.auxiliary = auxiliary
        self.namespace = namespace
        self.context_window = self._adapter.window(context_window)
        self._renderer = PromptRenderer(self.template, tokenizer)
        self._lock = lock_of(model)
        self._costs = Costs(enabled=cost_aware)
        joint = self._loader(self.combinations, prefill_dtype, None)
        loader = self._loader(self.store, prefill_dtype, joint)
        self._prefiller = loader.prefiller if loader else None
        self._joint = Combinations(loader, joint, self.context_window) if loader and joint else None
        self._planner = Planner(self._renderer, self._prefiller, self.context_window)
        stores = (self.store, self.combinations)
        self._gate = BoundGate.of(gate, self._prefiller, self._renderer, stores, auxiliary)
        with self._lock:  # it may try out the model
            self._answerer = Answerer(
                self._adapter,
                tokenizer,
                self._renderer,
                loader,
                self.context_window,
                auxiliary,
                rotation,
            )

    def _loader(
        self, store: ChunkStore, dtype: torch.dtype | None, combinations: ContextLoader | None
    ) -> ContextLoader | None:
        ids = self._renderer.prefix_ids
        prefiller = Prefiller.of(self._adapter, store, ids, self.namespace, dtype)
        if prefiller is None:
            return None
        return ContextLoader(prefiller, self._renderer, self._costs, combinations)

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
        **options: Any,
    ) -> Engine:
        """Load a model and make an engine for it.

        Args:
            name: Hub id, folder, or "tiny" for the small reader that comes with this package.
            store: Where chunks go.
            template: None for the one the model brings along (`prompt_template.json`), else the
                default.
            dtype: "auto" for the checkpoint's own.
            device: "cpu", "cuda", ...; None for CUDA if there is one.
            model_kwargs: Further arguments of transformers' `from_pretrained`, such as `revision`.
            options: Further arguments of `Engine`.

        Raises:
            InvalidInputError: If the model cannot be loaded.
        """
        model, tokenizer, brought = load(
            name, dtype=dtype, device=device, options=dict(model_kwargs or {})
        )
        return cls(model, tokenizer, store=store, template=template or brought, **options)

    @property
    def prefix_text(self) -> str:
        """What stands before the first chunk of every prompt."""
        return self._renderer.prefix_text

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Chat messages as one prompt for `complete`, by the tokenizer's chat template."""
        return self._renderer.render_chat(messages)

    def tokenize(
        self, question: str, chunks: Sequence[str] = (), history: Sequence[Message] = ()
    ) -> PromptIds:
        """The very ids that every path uses."""
        return self._renderer.tokenize(question, chunks, history)

    def tokenize_text(self, prompt: str) -> tuple[int, ...]:
        """The ids that `complete` continues."""
        return self._renderer.text_ids(prompt)

    def generate(self, question: str, chunks: Sequence[ChunkInput] = (), **options: Any) -> Answer:
        """Answer a question over chunks.

        Args:
            question: Not empty.
            chunks: Texts, keys, or both (`StoredChunk`), best first; they stand in this order.
            options: `policy`, `history`, `max_new_tokens`, `overflow`, `stop`, `scores` as in
                `Planner.request`; `emit`, called with each piece of text as it comes; `cancelled`,
                an event that stops generation; and arguments of transformers' `generate()`.
                Greedy unless `do_sample=True`.

        Raises:
            InvalidInputError: If an argument cannot be used.
            ContextTooLongError: If the prompt does not fit and `overflow` is "error".
            UnsupportedModelError: If the policy moves chunks and the model's keys cannot move.
        """
        emit, cancelled = options.pop("emit", None), options.pop("cancelled", None)
        return self._run(self._request(question, chunks, options), emit, cancelled)

    def stream(
        self, question: str, chunks: Sequence[ChunkInput] = (), **options: Any
    ) -> AnswerStream:
        """Like `generate`, as an iterator of pieces of text; its `metrics` are known at the end."""
        request = self._request(question, chunks, {**options, "streaming": True})
        return AnswerStream(lambda emit, cancelled: self._run(request, emit, cancelled))

    def generate_batch(self, questions: Sequence[Asked], **options: Any) -> list[Answer]:
        """Answer several questions in one padded batch; equals the single answers.

        Args:
            questions: Question and chunks of each, and its history if it has one.
            options: As for `generate`, the same for all; `overflow="refine"` is not possible here.
        """
        cancelled = options.pop("cancelled", None)
        requests = []
        for question, chunks, *history in questions:
            own = {"history": history[0]} if history else {}
            requests.append(self._request(question, chunks, {**options, **own}))
        if any(len(request.rounds) > 1 for request in requests):
            raise InvalidInputError('overflow="refine" needs several rounds; use generate for it')
        with self._lock:
            return answer_batch(self._answerer, requests, cancelled)

    def logits(
        self,
        question: str,
        chunks: Sequence[ChunkInput] = (),
        *,
        policy: ReusePolicy | None = None,
        answer_ids: Sequence[int] = (),
    ) -> Tensor:
        """Logits of the query's tokens over the stitched context, for checks.

        Args:
            question: Not empty.
            chunks: As for `generate`.
            policy: What to reuse.
            answer_ids: Tokens of an answer, read behind the query as part of it.

        Returns:
            `(query_tokens + len(answer_ids), vocabulary)` float32 on the CPU.
        """
        options = {"policy": policy, "max_new_tokens": 1 + len(answer_ids)}
        request = self._request(question, chunks, options)
        request = replace(request, query=(*request.query, *answer_ids))
        with self._lock:
            return self._answerer.logits(self._answerer.prompt(request, 0, ""))

    def complete(self, prompt: str, **options: Any) -> Answer:
        """Continue a text as it is, without template and chunks.

        Args:
            prompt: Not empty; the beginning-of-sequence token is added unless it is there.
            options: `max_new_tokens`, `stop`, `emit`, `cancelled` (as for `generate`) and further
                arguments of transformers' `generate()`.
        """
        emit, cancelled = options.pop("emit", None), options.pop("cancelled", None)
        return self._run(self._planner.completion(prompt, **options), emit, cancelled)

    def stream_complete(self, prompt: str, **options: Any) -> AnswerStream:
        """`complete`, as an iterator of pieces of text."""
        request = self._planner.completion(prompt, streaming=True, **options)
        return AnswerStream(lambda emit, cancelled: self._run(request, emit, cancelled))

    def _request(
        self, question: str, chunks: Sequence[ChunkInput], options: dict[str, Any]
    ) -> Request:
        policy = options.pop("policy", None) or self.policy
        request = self._planner.request(question, chunks, policy=policy, **options)
        request = self._gate.admitted(request)
        return self._joint.arranged(request) if self._joint is not None else request

    def _run(
        self, request: Request, emit: Emit | None, cancelled: threading.Event | None
    ) -> Answer:
        with self._lock:
            return self._answerer.run(request, emit, cancelled)
