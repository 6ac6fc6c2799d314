"""Answer prompts: load their contexts, run the model over the rest, decode its output.

One path for everything: a batch shares one left-padded forward pass, one answer is a batch of one,
a stream hands on what is decoded, and logits are the same pass without generating.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kvcache_rag.errors import KVCacheRagError, refuse
from kvcache_rag.generation.context import (
    Context,
    ContextBuilder,
    ContextRow,
    Prompt,
)
from kvcache_rag.generation.prompt_memory import PromptMemory
from kvcache_rag.generation.request import NONE_SAYS, OtherLengthsError
from kvcache_rag.generation.text_decoder import TextDecoder
from kvcache_rag.metrics import Answer, Metrics, joined
from kvcache_rag.models.cache import stock_cache
from kvcache_rag.models.generate import Generated, beams, generate, uses_beams
from kvcache_rag.models.language import StoppedError
from kvcache_rag.policies.checks import why_not
from kvcache_rag.stitching.loader import LoadedContext
from kvcache_rag.stitching.stitch import StitchedPrompt

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from kvcache_rag.generation.context import RotationMode
    from kvcache_rag.generation.question import ReadingReport
    from kvcache_rag.generation.request import Request
    from kvcache_rag.generation.stream import Emit
    from kvcache_rag.generation.telemetry import AnswerWatch
    from kvcache_rag.models.language import LanguageModel
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.prefill import ContextChunk, Prefiller
    from kvcache_rag.prompt.renderer import PromptRenderer
    from kvcache_rag.stitching.loader import ContextLoader


_Result = TypeVar("_Result")


class Runner:
    """Runs prompts on a model.  Not thread-safe: the engine holds a lock around it.

    Attributes:
        memory: Of prompts.
        aside: Memory for what is read before an answer, so that no prompt is forgotten for it.
        context_builder: Brings their contexts; None for a model that keeps no keys and values.
        watch: Is told when what was done; None while nobody wants to know.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,
        renderer: PromptRenderer,
        loader: ContextLoader | None,
        window: int,
        longest: int,
        auxiliary: Scorer | None = None,
        rotation: RotationMode = "auto",
        memory: PromptMemory | None = None,
        aside: PromptMemory | None = None,
    ) -> None:
        """Answer with `model`.

        Args:
            model: The model.
            tokenizer: Its tokenizer.
            renderer: Writes prompts.
            loader: None for a model that keeps no keys and values.
            window: Context window in tokens.
            longest: That of a full prefill.
            auxiliary: Scores chunks for policies that bring no scorer of their own.
            rotation: Whether keys are copied and rotated, or the query is rotated.
            memory: Of prompts; None for one of its own.
            aside: Likewise.
        """
        self.model, self.tokenizer, self.renderer = model, tokenizer, renderer
        self.loader, self.window, self.longest = loader, window, longest
        self.auxiliary, self.rotation = auxiliary, rotation
        self.memory = memory or PromptMemory(model)
        self.aside = aside or PromptMemory(model, 0)
        self.watch: AnswerWatch | None = None
        self.context_builder: ContextBuilder | None = None
        if loader is not None:
            self.context_builder = _context_builder_class(model)(
                model, tokenizer, loader, self.memory, auxiliary, rotation
            )

    @property
    def prefiller(self) -> Prefiller | None:
        """What computes chunks; None for a model that keeps no keys and values."""
        return None if self.loader is None else self.loader.prefiller

    def over(
        self,
        renderer: PromptRenderer,
        loader: ContextLoader | None,
        auxiliary: Scorer | None,
        memory: PromptMemory | None = None,
    ) -> Runner:
        """For other prompts and chunks; in the same memory, unless another one is given."""
        return Runner(
            self.model,
            renderer.encoder.tokenizer,
            renderer,
            loader,
            self.window,
            self.longest,
            auxiliary,
            self.rotation,
            memory or self.memory,
            self.aside,
        )

    def apart(self) -> Runner:
        """The same in memory aside, in which no prompt goes on from another."""
        return self.over(self.renderer, self.loader, self.auxiliary, self.aside)

    def forget(self) -> None:
        """Release the memory of prompts."""
        self.memory.forget()
        self.aside.forget()

    def run(self, request: Request, emit: Emit | None, cancelled: threading.Event | None) -> Answer:
        """Answer a request, round by round; only the last round is handed on as it comes."""
        if request.says_none:
            return _none_says(request, emit)
        answer, begun = cancelled_answer(request), request.started
        last = len(request.rounds) - 1
        for number in range(last + 1):
            if cancelled is not None and cancelled.is_set():
                break
            said = answer.text
            if not request.skip_special_tokens:  # without the control tokens
                said = TextDecoder(self.tokenizer).push(answer.token_ids)
            prompt = self.prompt(request, number, said)
            piecewise = emit if number == last else None
            (later,) = self.answers([prompt], begun, piecewise, cancelled)
            if number:
                metrics = joined(answer.metrics, later.metrics, begun - request.started)
                later = replace(later, metrics=metrics)
            answer, begun = later, time.perf_counter()
        return answer

    def run_batch(
        self, requests: Sequence[Request], cancelled: threading.Event | None = None
    ) -> list[Answer]:
        """Answer several requests of one policy, of one round each, in one left-padded batch."""
        if any(request.says_none for request in requests):
            others = [request for request in requests if not request.says_none]
            answers = iter(self.run_batch(others, cancelled))
            return [
                _none_says(request, None) if request.says_none else next(answers)
                for request in requests
            ]
        if self.model.layout is not None and not self.model.layout.groups:
            # Of recurrent layers alone: one prompt at a time (`models/generate.py`).
            return [self.run(request, None, cancelled) for request in requests]
        prompts = [self.prompt(request, 0, "") for request in requests]
        if len(prompts) > 1 and (self.why_apart(prompts) or self._act_apart(prompts)):
            half = len(requests) // 2
            first, second = requests[:half], requests[half:]
            return [*self.run_batch(first, cancelled), *self.run_batch(second, cancelled)]
        return self.answers(prompts, requests[0].started, None, cancelled) if prompts else []

    def _act_apart(self, prompts: Sequence[Prompt]) -> bool:
        """Whether an adapter for questions has to act on prompts of a batch one by one.

        In a padded pass its questions begin together, behind documents that are there.
        """
        if not self.model.question_adapter:
            return False
        with_documents = sum(prompt.has_documents for prompt in prompts)
        are_open = any(prompt.fresh or self._is_computed(prompt) for prompt in prompts)
        return with_documents not in (0, len(prompts)) or bool(with_documents and are_open)

    def _is_computed(self, prompt: Prompt) -> bool:
        return self.context_builder is None or self.is_full(prompt)

    def why_apart(self, prompts: Sequence[Prompt]) -> str:
        """Why prompts cannot be one batch; "" if they can."""
        request = prompts[0].request
        prefix = 0 if request.is_plain else len(self.renderer.prefix_ids)
        tokens = [prefix + sum(map(len, one.chunks)) + len(one.query) for one in prompts]
        room = request.max_new_tokens
        return self.model.why_apart(tokens, room=room, beams=beams(request.options))

    def prompt(self, request: Request, number: int, answer: str) -> Prompt:
        """The prompt of round `number`, given the answer so far."""
        query = self._query(request, number, answer)
        chunks = request.rounds[number]
        cached = len(chunks) - request.fresh[number]
        fresh = tuple(map(self._written, chunks[cached:]))
        behind = tuple(token for chunk in fresh for token in chunk.ids)
        return Prompt(chunks[:cached], (*behind, *query), request, fresh)

    def _written(self, chunk: ContextChunk) -> ContextChunk:
        """A chunk with its ids; of a reference its text is what counts, whatever its key says."""
        if chunk.ids or self.loader is None:
            return chunk
        written = self.loader.from_text(chunk)
        return written if written.ids else replace(written, ids=self.loader.ids(written))

    def _ids(self, chunk: ContextChunk) -> Sequence[int]:
        return chunk.ids if self.loader is None else self.loader.ids(chunk)

    def _query(self, request: Request, number: int, answer: str) -> tuple[int, ...]:
        """History, question and what was found so far, in round `number`."""
        chunks = request.rounds[number]
        if not number:
            return request.query
        context = len(self.renderer.prefix_ids) + sum(map(len, chunks))
        window = self.longest if request.policy.is_full else self.window
        room = window - context - request.max_new_tokens
        while True:
            query = self.renderer.query_ids(
                request.question, request.history, answer, request.arguments
            )
            if len(query) <= room or not answer:
                return query
            # Written down and read again, an answer may have more tokens than were generated.
            answer = answer[: len(answer) * 3 // 4]

    def is_full(self, prompt: Prompt) -> bool:
        """Whether everything is computed: by the policy's wish, or for want of a context."""
        context = len(self.renderer.prefix_ids) + sum(map(len, prompt.chunks))
        return not context or prompt.policy.is_full

    def ensure_possible(self, prompt: Prompt) -> None:
        """Raise `UnsupportedModelError` if the model cannot use chunks as their policy wants."""
        refuse(why_not(prompt.policy, self.model.abilities, len(prompt.chunks)))

    def answers(
        self,
        prompts: Sequence[Prompt],
        started: float,
        emit: Emit | None,
        cancelled: threading.Event | None,
    ) -> list[Answer]:
        """Answer prompts whose requests are alike in one batch.

        Args:
            prompts: One or more.
            started: `time.perf_counter()` at the call.
            emit: Called with each piece of the text of a single prompt.
            cancelled: Stops at the next token once set.
        """
        try:
            return self._over(
                prompts,
                lambda context: self._generated(context, prompts, started, emit, cancelled),
                cancelled,
            )
        except StoppedError:
            return [cancelled_answer(prompt.request) for prompt in prompts]

    def logits(
        self,
        prompts: Sequence[Prompt],
        keep: int,
        cancelled: threading.Event | None = None,
        *,
        as_answered: bool = False,
    ) -> Tensor:
        """Logits of the last `keep` tokens of each query, `(prompts, keep, vocabulary)` float32.

        Args:
            prompts: One or more.
            keep: Of how many tokens.
            cancelled: Stops it once set.
            as_answered: Whether an adapter for questions acts, as when the only prompt is answered.

        Raises:
            StoppedError: If it was cancelled before the contexts were there.
        """

        def passed(context: Context) -> Tensor:
            # The whole queries, also where generating would compute the last token alone.
            open_ = [row.shape.tokens - row.shape.context_tokens for row in context.rows]
            ids, mask = self._padded(context.rows)
            positions = (mask.cumsum(1) - 1).clamp(min=0)  # (prompts, tokens)
            is_padded = len(open_) > 1 and self.model.abilities.memory == "ours"
            first, acts = ids.shape[1] - max(open_), as_answered and self._acts(prompts)
            with context.attended():
                cache = context.cache(open_)
                if acts:
                    cache = self._behind_documents(prompts, ids, mask, cache)
                    first = cache.get_seq_length()
                with self.model.on_question() if acts else nullcontext():
                    logits = self.model.forward(
                        ids[:, first:],
                        cache,
                        positions[:, first:],
                        mask=mask.to(self.model.device) if is_padded else None,
                        keep=keep,
                    )
            return logits.float().cpu()

        alone = [replace(prompt, may_continue=False) for prompt in prompts]
        return self._over(alone, passed, cancelled)

    def _over(
        self,
        prompts: Sequence[Prompt],
        run: Callable[[Context], _Result],
        cancelled: threading.Event | None = None,
    ) -> _Result:
        """What `run` gives over the context of prompts.

        Raises:
            StoppedError: If it was cancelled before the context was there.
        """
        try:
            with torch.inference_mode():
                with self.model.interruptible(cancelled):
                    context = self._context(prompts)
                return run(context)
        except (StoppedError, KVCacheRagError, OtherLengthsError):
            raise  # what it had begun is in memory that no prompt goes on from
        except BaseException:
            self.forget()  # perhaps for want of it
            raise

    def _context(self, prompts: Sequence[Prompt]) -> Context:
        context = self._brought(prompts)
        for prompt, row in zip(prompts, context.rows, strict=True):
            self.ensure_planned(prompt.request, len(row.ids))
            self.model.ensure_embedded(row.ids)
        return context

    def _brought(self, prompts: Sequence[Prompt]) -> Context:
        if not all(map(self.is_full, prompts)):
            for prompt in prompts:
                self.ensure_possible(prompt)
            if self.context_builder is not None:
                return self.context_builder.build(prompts)
        rows = [self._plain(prompt) for prompt in prompts]
        if self.context_builder is None:
            return Context(self.model, rows)
        documents = prompts[0].question_start(rows[0].ids) if self._acts(prompts) else 0
        return self.context_builder.computed(rows, prompts[0].request, documents)

    def _acts(self, prompts: Sequence[Prompt]) -> bool:
        """Whether an adapter for questions acts on those of a batch."""
        return bool(self.model.question_adapter) and prompts[0].has_documents

    def _behind_documents(
        self, prompts: Sequence[Prompt], ids: Tensor, mask: Tensor, cache: Any
    ) -> Any:
        """A cache that ends where questions begin: the untouched model computes what it lacks."""
        if len(prompts) > 1:  # it ends there (`_act_apart`)
            return cache
        (prompt,) = prompts
        if cache is None:
            room, rows = prompt.request.max_new_tokens, beams(prompt.request.options)
            cache = self.model.new_cache(mask, room=room, beams=rows)
            cache = stock_cache(self.model.model.config) if cache is None else cache
        held, stop = cache.get_seq_length(), prompt.question_start(ids[0])
        if held < stop:
            self.model.forward(ids[:, held:stop], cache, torch.arange(held, stop), keep=1)
        return cache

    def ensure_planned(self, request: Request, tokens: int) -> None:
        """Raise `OtherLengthsError` if a prompt of so many tokens is not what was planned.

        What a reference says of a length is a hint, by which it may have been found to fit.
        """
        window = self.longest if request.policy.is_full else self.window
        if tokens - request.answer_tokens + request.max_new_tokens > window:
            raise OtherLengthsError

    def _plain(self, prompt: Prompt) -> ContextRow:
        """A prompt of which everything is computed."""
        context: list[int] = [] if prompt.request.is_plain else [*self.renderer.prefix_ids]
        for chunk in prompt.chunks:
            context += self._ids(chunk)
        ids = torch.tensor([*context, *prompt.query])  # (tokens,) int64
        # Of what a reference stands for, whatever it says of the length.
        tokens = len(context) - (0 if prompt.request.is_plain else len(self.renderer.prefix_ids))
        loaded = LoadedContext(tuple(context), prefilled_tokens=tokens)
        return ContextRow(ids, StitchedPrompt.from_sizes(0, [], len(ids)), loaded, prompt.policy)

    def _generated(
        self,
        context: Context,
        prompts: Sequence[Prompt],
        started: float,
        emit: Emit | None,
        cancelled: threading.Event | None,
    ) -> list[Answer]:
        request = prompts[0].request
        decoders = [
            TextDecoder(self.tokenizer, prompt.request.stop, prompt.request.skip_special_tokens)
            for prompt in prompts
        ]

        def push(row: int, ids: Sequence[int]) -> bool:
            piece = decoders[row].push(ids)
            if piece and emit is not None:
                emit(piece)
            return decoders[row].stopped

        # Of beams, the best is known at the end only.
        watch = None if uses_beams(request.options) else push
        ids, mask = self._padded(context.rows)
        with context.attended():
            cache = context.cache([row.missing for row in context.rows])
            before, acts = time.perf_counter(), self._acts(prompts)
            if acts:
                with self.model.interruptible(cancelled):
                    cache = self._behind_documents(prompts, ids, mask, cache)
            with self.model.on_question() if acts else nullcontext():
                generated = generate(
                    self.model,
                    ids,
                    mask,
                    cache,
                    max_new_tokens=request.max_new_tokens,
                    tokenizer=self.tokenizer,
                    options=request.options,
                    emit=watch,
                    cancelled=cancelled,
                )
        context.leave(generated.rows, cache, is_cut=cancelled is not None and cancelled.is_set())
        if watch is None:
            generated = replace(generated, rows=tuple(map(_pushed, decoders, generated.rows)))
        for decoder in decoders:
            rest = decoder.finish()
            if rest and emit is not None:
                emit(rest)
        if self.watch is not None:
            self.watch.took(context, before, generated, streams=emit is not None)
        return [
            self._answer(prompt, decoder, generated, context, (started, before), row)
            for row, (prompt, decoder) in enumerate(zip(prompts, decoders, strict=True))
        ]

    def _padded(self, rows: Sequence[ContextRow]) -> tuple[Tensor, Tensor]:
        """Ids and mask `(rows, tokens)` int64, left-padded without holes between tokens."""
        if len(rows) == 1:
            ids = rows[0].ids[None]  # (1, tokens)
            return ids, torch.ones_like(ids)
        width = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), width), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, width - len(row.ids) :] = row.ids
            mask[number, width - len(row.ids) :] = 1
        return ids, mask

    def _answer(
        self,
        prompt: Prompt,
        decoder: TextDecoder,
        generated: Generated,
        context: Context,
        times: tuple[float, float],
        row: int,
    ) -> Answer:
        """Text and cost of row `row`; `times` are the clock at the call and before generating."""
        (started, before), request = times, prompt.request
        costs: dict[str, Any] = {
            "ttft": generated.first_at - started,
            "prefill": generated.first_at - before,
            "total": generated.ended_at - started,
            "prefix_tokens": 0 if request.is_plain else len(self.renderer.prefix_ids),
            "query_tokens": len(prompt.query) - prompt.fresh_tokens,
            "fresh_tokens": prompt.fresh_tokens,
            "generated_tokens": len(generated.rows[row]),
            "dropped_chunks": request.dropped_chunks,
            "unused_chunks": request.unused_chunks,
            "answered_from": prompt.places,
            "prefix_mismatch": request.prefix_mismatch,
            "gate": request.gate,
            "references": request.references,
            "reading": request.read.seconds,
            "read_chunks": request.read.chunks,
            "relevance": request.read.relevance,
            **_with_read(context.costs(row), request.read, prompt),
        }
        reason = "stop" if decoder.stopped else generated.finish_reasons[row]
        return Answer(decoder.text, Metrics(**costs), generated.rows[row], reason)


def _none_says(request: Request, emit: Emit | None) -> Answer:
    """That no chunk says what is asked; nothing is generated."""
    if emit is not None:
        emit(NONE_SAYS)
    seconds = time.perf_counter() - request.started
    read = request.read
    costs = _with_read({"missed": (), "hits": {}, "reused_tokens": 0, "prefilled_tokens": 0}, read)
    metrics = Metrics(
        ttft=seconds,
        total=seconds,
        policy=repr(request.policy),
        gate=request.gate,
        reading=read.seconds,
        read_chunks=read.chunks,
        relevance=read.relevance,
        says_none=True,
        **costs,
    )
    return Answer(NONE_SAYS, metrics, finish_reason="stop")


def _with_read(
    costs: Mapping[str, Any], read: ReadingReport, prompt: Prompt | None = None
) -> dict[str, Any]:
    """What a prompt cost, and with it chunks that were computed to be read before.

    Those of them that are answered from were not cached; the others were computed for reading.
    """
    known = {one.chunk for one in costs["missed"]}
    hits = Counter(costs["hits"])
    # A full prefill finds none, and computes them once more.
    chunks = prompt.chunks if prompt is not None and hits else ()
    brought = {chunk.place for chunk in chunks if not chunk.is_joint} - known
    found = [one for one in read.missed if one.chunk in brought]
    tokens = sum(one.tokens for one in found)
    for _ in found:
        tier = next((tier for tier in hits if hits[tier]), "")
        hits[tier] -= 1
    missed = (*costs["missed"], *(one for one in read.missed if one.chunk not in known))
    others = sum(one.tokens for one in read.missed if one.chunk not in brought | known)
    return {
        **costs,
        "hits": dict(+hits),
        "reused_tokens": costs["reused_tokens"] - tokens,
        "prefilled_tokens": costs["prefilled_tokens"] + tokens,
        "missed": missed,
        "misses": len(missed),
        "read_tokens": read.tokens + others,
    }


def cancelled_answer(request: Request) -> Answer:
    """An answer that was cancelled before anything of it was said."""
    metrics = Metrics(policy=repr(request.policy), gate=request.gate)
    return Answer("", metrics, finish_reason="length")


def _context_builder_class(model: LanguageModel) -> type[ContextBuilder]:
    """Who brings contexts for a model."""
    own: type[ContextBuilder] | None = model.contexts()
    if own is not None:
        return own
    from kvcache_rag.generation.buffered import BufferContextBuilder  # it loads much

    return BufferContextBuilder


def _pushed(decoder: TextDecoder, ids: Sequence[int]) -> tuple[int, ...]:
    """Decode ids one by one, and give those up to the end of the text."""
    for count, token in enumerate(ids, 1):
        decoder.push([token])
        if decoder.stopped:
            return tuple(ids[:count])
    return tuple(ids)
