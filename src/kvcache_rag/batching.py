"""Answer several prompts in one left-padded batch without holes between tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvcache_rag.holding import Holder, attending, held_cache
from kvcache_rag.models.generate import generate, uses_beams
from kvcache_rag.streaming import TextDecoder

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from kvcache_rag.answering import Answerer
    from kvcache_rag.context import ContextChunk
    from kvcache_rag.filling import FilledRow, Prompt, RowFiller
    from kvcache_rag.holding import Known, Row
    from kvcache_rag.metrics import Answer
    from kvcache_rag.request import ChunkInput, Request
    from kvcache_rag.template import Message

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
