"""Answer one prompt: load and stitch, or prefill plainly, then generate.

Below `Engine`, above everything that knows only its own part.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.generation.context import (
    FilledRow,
    HeldRow,
    Holder,
    Prompt,
    Row,
    RowFiller,
    attending,
    held_cache,
)
from kvcache_rag.generation.rotation_mode import Deferral
from kvcache_rag.generation.stream import Emit, TextDecoder
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.metrics import Answer, Metrics, joined
from kvcache_rag.models.generate import Generated, generate, uses_beams
from kvcache_rag.recompute import recompute_logits
from kvcache_rag.stitching.overlap import used, while_loading

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from kvcache_rag.generation.context import Known
    from kvcache_rag.generation.request import ChunkInput, Request
    from kvcache_rag.generation.rotation_mode import RotationMode
    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.prompt.renderer import PromptRenderer
    from kvcache_rag.prompt.template import Message
    from kvcache_rag.stitching.loader import ContextChunk, ContextLoader


_Given = TypeVar("_Given")

# Room for generated tokens is rounded up, so that a buffer can serve the next question too.
CAPACITY_STEP = 256


class Answerer:
    """Runs prompts on a model.  Not thread-safe: the engine holds a lock around it."""

    def __init__(
        self,
        model: TransformersModel,
        tokenizer: Any,
        renderer: PromptRenderer,
        loader: ContextLoader | None,
        window: int,
        auxiliary: Scorer | None = None,
        rotation: RotationMode = "auto",
    ) -> None:
        """Answer with `model`.

        Args:
            model: The model.
            tokenizer: Its tokenizer.
            renderer: Writes prompts.
            loader: None for a model that keeps no keys and values.
            window: Context window in tokens.
            auxiliary: Scores chunks for policies that bring no scorer of their own.
            rotation: Whether keys are copied and turned, or the query is turned.
        """
        self.model, self.tokenizer, self.renderer = model, tokenizer, renderer
        self.loader, self.window = loader, window
        self.filler: RowFiller | None = None
        self.deferral: Deferral | None = None
        if loader is not None:
            self.filler = RowFiller(model, tokenizer, loader, auxiliary)
            self.deferral = Deferral(rotation, loader)
        self._buffer: KVBuffer | None = None

    def is_full(self, prompt: Prompt) -> bool:
        """Whether everything is computed: by the policy's wish, or for want of a context."""
        context = len(self.renderer.prefix_ids) + sum(map(len, prompt.chunks))
        return not context or prompt.request.policy.is_full

    def context_ids(self, chunks: Sequence[ContextChunk]) -> tuple[int, ...]:
        """Ids of prefix and chunks."""
        ids = [*self.renderer.prefix_ids]
        for chunk in chunks:
            known = chunk.ids or ()
            ids += known if known or self.loader is None else self.loader.ids(chunk)
        return tuple(ids)

    def prompt(self, request: Request, number: int, answer: str) -> Prompt:
        """The prompt of round `number`, given the answer so far."""
        chunks = request.rounds[number]
        if not number:
            return Prompt(chunks, request.query, request)
        context = len(self.renderer.prefix_ids) + sum(map(len, chunks))
        room = self.window - context - request.max_new_tokens
        while True:
            asked = self.renderer.template.ask_again(request.question, answer)
            query = self.renderer.query_ids(asked, request.history)
            if len(query) <= room or not answer:
                return Prompt(chunks, query, request)
            # Written down and read again, an answer may have more tokens than were generated.
            answer = answer[: len(answer) * 3 // 4]

    def run(self, request: Request, emit: Emit | None, cancelled: threading.Event | None) -> Answer:
        """Answer a request, round by round; only the last round is handed on as it comes."""
        nothing = Metrics(policy=repr(request.policy), gate=request.gate)
        answer, begun = Answer("", nothing, finish_reason="length"), request.started
        last = len(request.rounds) - 1
        for number in range(last + 1):
            if cancelled is not None and cancelled.is_set():
                break
            prompt = self.prompt(request, number, answer.text)
            with torch.inference_mode():
                later = self.answer(prompt, begun, emit if number == last else None, cancelled)
            if number:
                metrics = joined(answer.metrics, later.metrics, begun - request.started)
                later = replace(later, metrics=metrics)
            answer, begun = later, time.perf_counter()
        return answer

    def logits(self, prompt: Prompt) -> Tensor:
        """Logits of the query's tokens, `(query, vocabulary)` float32 on the CPU."""
        return self._loading(lambda ahead: self._logits(prompt, ahead=ahead))

    def _logits(self, prompt: Prompt, *, ahead: bool) -> Tensor:
        with torch.inference_mode():
            filled = self._filled(prompt, ahead=ahead)
            if isinstance(filled, FilledRow) and filled.selected is not None:
                return recompute_logits(filled.row, filled.selected).float().cpu()
            ids, cache = self._inputs(prompt, filled)
            behind = 0 if cache is None else ids.shape[1] - len(prompt.query)
            positions = torch.arange(behind, ids.shape[1])
            arriving = filled.loaded.ahead if isinstance(filled, FilledRow) else None
            with used(arriving), attending(self.model, prompt.request.policy, [filled]):
                logits = self.model.forward(
                    ids[:, behind:], cache, positions, keep=len(prompt.query)
                )
            return logits[0].float().cpu()

    def answer(
        self, prompt: Prompt, started: float, emit: Emit | None, cancelled: threading.Event | None
    ) -> Answer:
        """Answer one prompt, handing text on as it comes."""
        once = "streamer" in prompt.request.options  # it is given the prompt before the first layer
        return self._loading(
            lambda ahead: self._answer(prompt, started, emit, cancelled, ahead=ahead and not once)
        )

    def _loading(self, run: Callable[[bool], _Given]) -> _Given:
        try:
            return while_loading(run)
        except BaseException:
            self.forget()  # a loader that was interrupted may still write to the buffer
            raise

    def _answer(
        self,
        prompt: Prompt,
        started: float,
        emit: Emit | None,
        cancelled: threading.Event | None,
        *,
        ahead: bool,
    ) -> Answer:
        request = prompt.request
        decoder = TextDecoder(self.tokenizer, request.stop)

        def push(ids: Sequence[int]) -> bool:
            piece = decoder.push(ids)
            if piece and emit is not None:
                emit(piece)
            return decoder.stopped

        filled = self._filled(prompt, ahead=ahead)
        if isinstance(filled, FilledRow) and self.filler is not None:
            filled = self.filler.recompute(filled)
        ids, cache = self._inputs(prompt, filled)
        before = time.perf_counter()
        watch = None if uses_beams(request.options) else push
        arriving = filled.loaded.ahead if isinstance(filled, FilledRow) else None
        with used(arriving), attending(self.model, request.policy, [filled]):
            generated = generate(
                self.model,
                ids,
                torch.ones_like(ids),
                cache,
                max_new_tokens=request.max_new_tokens,
                tokenizer=self.tokenizer,
                options=request.options,
                emit=watch,
                cancelled=cancelled,
            )
        if watch is None:
            decoder.push(generated.rows[0])
        rest = decoder.finish()
        if rest and emit is not None:
            emit(rest)
        before += 0.0 if arriving is None else arriving.waited
        return self.result(prompt, decoder, generated, filled, (started, before), 0)

    def _filled(self, prompt: Prompt, *, ahead: bool = False) -> Row | None:
        """The prompt's context, copied into the buffer or held; None for a plain prefill."""
        if prompt.request.is_plain:
            return None
        if self.filler is None or self.is_full(prompt):
            self.ensure_capturable(prompt)
            return None
        try:
            return self._fill(self.filler, prompt, prompt.chunks, ahead=ahead)
        except ChunkNotFoundError:
            # A reference has gone, or was not what it said: its text is what counts.
            texts = [self.filler.loader.from_text(chunk) for chunk in prompt.chunks]
            return self._fill(self.filler, prompt, texts)

    def _fill(
        self,
        filler: RowFiller,
        prompt: Prompt,
        chunks: Sequence[ContextChunk],
        *,
        ahead: bool = False,
    ) -> Row:
        why = self.why_copied([prompt])
        if not why:
            return Holder(filler.loader).hold(prompt, chunks, {})
        length = len(self.renderer.prefix_ids) + sum(map(len, chunks))
        buffer = self.room(1, length + len(prompt.query) + prompt.request.max_new_tokens)
        filled = filler.fill(buffer, 0, 0, prompt, chunks, ahead=ahead)
        return replace(filled, not_deferred=why)

    def why_copied(self, prompts: Sequence[Prompt]) -> str:
        """Why the chunks of a batch are copied, or "" to attend to them where they lie."""
        return "" if self.deferral is None else self.deferral.why_copied(prompts)

    def _inputs(self, prompt: Prompt, filled: Row | None) -> tuple[Tensor, Any]:
        """Ids `(1, n)`, and a cache of all but the last of them (None for a plain prefill)."""
        if filled is None:
            context = () if prompt.request.is_plain else self.context_ids(prompt.chunks)
            return torch.tensor([[*context, *prompt.query]]), None
        if isinstance(filled, HeldRow):
            buffer = self.room(1, filled.missing + prompt.request.max_new_tokens)
            return filled.ids[None], held_cache(self.model, [filled], buffer)
        held = filled.row.shape.tokens - filled.missing
        cache = self.model.cache(filled.row.buffer, held, arrivals=filled.loaded.ahead)
        return filled.row.ids[None], cache

    def ensure_capturable(self, prompt: Prompt) -> None:
        """Raise `UnsupportedModelError` if chunks shall be reused and the model keeps none."""
        if prompt.chunks and not self.is_full(prompt):
            _ = self.model.measured

    def room(self, rows: int, capacity: int) -> KVBuffer:
        """The buffer of the last prompt if it is large enough, else a new one."""
        held = self._buffer
        if held is None or held.rows < rows or held.capacity < capacity:
            self._buffer = None  # let go of the old one before the new one is made
            rounded = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
            layout = self.model.measured.chunk_layout
            held = self._buffer = KVBuffer.allocate(layout, rows, rounded, self.model.device)
        return held.narrowed(rows)

    def forget(self) -> None:
        """Let go of the buffer of the last prompt."""
        self._buffer = None

    def result(
        self,
        prompt: Prompt,
        decoder: TextDecoder,
        generated: Generated,
        filled: Row | None,
        times: tuple[float, float],
        row: int,
    ) -> Answer:
        """Text and cost of row `row`; `times` are the clock at the call and before generating."""
        (started, before), request = times, prompt.request
        if self.loader is not None:
            whole = len(prompt.query) + sum(map(len, prompt.chunks))
            passed = whole if filled is None else filled.missing
            self.loader.passed(passed, generated.first_at - before)
        metrics = Metrics(
            ttft=generated.first_at - started,
            prefill=generated.first_at - before,
            total=generated.ended_at - started,
            prefix_tokens=0 if request.is_plain else len(self.renderer.prefix_ids),
            query_tokens=len(prompt.query),
            generated_tokens=len(generated.rows[row]),
            dropped_chunks=request.dropped_chunks,
            policy=repr(request.policy),
            prefix_mismatch=request.prefix_mismatch,
            gate=request.gate,
        )
        if filled is None:
            metrics = replace(metrics, prefilled_tokens=sum(map(len, prompt.chunks)))
        else:
            metrics = replace(metrics, **filled.costs)
        if self.deferral is not None:
            self.deferral.answered(prompt, metrics)
        reason = "stop" if decoder.stopped else generated.finish_reasons[row]
        return Answer(decoder.text, metrics, generated.rows[row], reason)


# Answer several prompts in one left-padded batch without holes between tokens.


Asked: TypeAlias = (
    "tuple[str, Sequence[ChunkInput]]"
    "| tuple[str, Sequence[ChunkInput], Sequence[Message | Mapping[str, str]]]"
)
"""A question with its chunks, and its history if it has one."""


@torch.inference_mode()
def answer_batch(
    runner: Answerer, requests: Sequence[Request], cancelled: threading.Event | None = None
) -> list[Answer]:
    """Answer several requests of one policy in one left-padded batch."""
    if not requests:
        return []
    prompts = [runner.prompt(request, 0, "") for request in requests]
    request = requests[0]
    contexts = [
        len(runner.renderer.prefix_ids) + sum(map(len, prompt.chunks)) for prompt in prompts
    ]
    lengths = [
        context + len(prompt.query) for context, prompt in zip(contexts, prompts, strict=True)
    ]
    width = max(lengths)
    cache = None
    rows: Sequence[Row | None] = [None] * len(prompts)
    if runner.filler is None or all(map(runner.is_full, prompts)):
        runner.ensure_capturable(prompts[0])
        texts = [runner.context_ids(prompt.chunks) for prompt in prompts]
    else:
        cache, filled = _fill(runner, runner.filler, prompts, lengths)
        texts = [one.loaded.ids for one in filled]
        rows = filled
    padding = runner.tokenizer.pad_token_id or 0
    ids = torch.full((len(prompts), width), padding)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        whole = [*text, *prompt.query]
        ids[row, width - len(whole) :] = torch.tensor(whole)
        mask[row, width - len(whole) :] = 1
    options = dict(request.options)
    if request.stop and not uses_beams(options):  # of beams, the best is known at the end only
        stops = _RowStops(runner, request.stop, len(prompts), width)
        options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), stops]
    before = time.perf_counter()
    with attending(runner.model, request.policy, rows):
        generated = generate(
            runner.model,
            ids,
            mask,
            cache,
            max_new_tokens=request.max_new_tokens,
            tokenizer=runner.tokenizer,
            options=options,
            cancelled=cancelled,
        )
    answers = []
    started = request.started
    for row, prompt in enumerate(prompts):
        decoder = TextDecoder(runner.tokenizer, request.stop)
        tokens: list[int] = []
        for token in generated.rows[row]:
            # One by one, because what follows a stop string is padding.
            tokens.append(token)
            decoder.push([token])
            if decoder.stopped:
                break
        decoder.finish()
        kept = (*generated.rows[:row], tuple(tokens), *generated.rows[row + 1 :])
        trimmed = replace(generated, rows=kept)
        answers.append(runner.result(prompt, decoder, trimmed, rows[row], (started, before), row))
    return answers


class _RowStops:
    """Ends each row of a batch where its answer alone would end.

    transformers' own `stop_strings` would also find what begins in the prompt.
    """

    def __init__(self, runner: Answerer, stop: Sequence[str], rows: int, width: int) -> None:
        """Look for `stop` in `rows` answers behind `width` columns."""
        self._decoders = [TextDecoder(runner.tokenizer, stop) for _ in range(rows)]
        self._seen = width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Which rows end; `(rows,)` bool."""
        fresh = input_ids[:, self._seen :].tolist()
        self._seen = input_ids.shape[1]
        for decoder, ids in zip(self._decoders, fresh, strict=True):
            decoder.push(ids)
        ended = [decoder.stopped for decoder in self._decoders]
        return torch.tensor(ended, device=input_ids.device)


def _fill(
    runner: Answerer, filler: RowFiller, prompts: Sequence[Prompt], lengths: Sequence[int]
) -> tuple[Any, Sequence[Row]]:
    why = runner.why_copied(prompts)
    if not why:
        known: Known = {}
        held = [Holder(filler.loader).hold(one, one.chunks, known) for one in prompts]
        room = max(row.missing for row in held) + prompts[0].request.max_new_tokens
        return held_cache(runner.model, held, runner.room(len(prompts), room)), held
    return _copy(runner, filler, prompts, lengths, why)


def _copy(
    runner: Answerer,
    filler: RowFiller,
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
    why: str,
) -> tuple[Any, Sequence[FilledRow]]:
    # A row's context ends where its query begins, so index = position + padding everywhere and
    # windows stay right.  The input's columns of rows with fewer missing tokens begin inside what
    # they hold, which is kept.
    width = max(lengths)
    buffer = runner.room(len(prompts), width + prompts[0].request.max_new_tokens)
    rows: list[FilledRow] = []
    known: dict[tuple[ContextChunk, ...], FilledRow] = {}
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        source = known.get(prompt.chunks)
        if source is not None:
            rows.append(filler.copy(source, buffer, row, width - length, prompt))
            continue
        filled = filler.fill(buffer, row, width - length, prompt, prompt.chunks)
        rows.append(filler.recompute(replace(filled, not_deferred=why)))
        if filled.can_be_copied:
            known[prompt.chunks] = rows[-1]
    longest = max(filled.missing for filled in rows)
    keep = torch.tensor([longest - filled.missing for filled in rows])
    cache = runner.model.cache(buffer, width - longest, keep.to(runner.model.device))
    return cache, rows
