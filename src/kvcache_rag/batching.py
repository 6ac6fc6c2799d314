"""Answer several prompts in one left-padded batch without holes between tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.generate import generate
from kvcache_rag.streaming import TextDecoder

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from kvcache_rag.answering import Answerer, Prompt
    from kvcache_rag.context import LoadedContext
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
    full = runner.loader is None or all(
        runner.is_full(request.policy, prompt.chunks, len(prompt.query)) for prompt in prompts
    )
    contexts = [
        len(runner.renderer.prefix_ids) + sum(map(len, prompt.chunks)) for prompt in prompts
    ]
    queries = [len(prompt.query) for prompt in prompts]
    width = max(context + query for context, query in zip(contexts, queries, strict=True))
    cache = None
    loads: Sequence[LoadedContext | None] = [None] * len(prompts)
    if full:
        runner.ensure_capturable(request.policy, prompts[0].chunks, queries[0])
        texts = [runner.context_ids(prompt.chunks) for prompt in prompts]
    else:
        cache, loaded = _load(runner, prompts, contexts, width)
        texts = [one.ids for one in loaded]
        loads = loaded
    padding = runner.tokenizer.pad_token_id or 0
    ids = torch.full((len(prompts), width), padding)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        whole = [*text, *prompt.query]
        ids[row, width - len(whole) :] = torch.tensor(whole)
        mask[row, width - len(whole) :] = 1
    options = dict(request.options)
    if request.stop:
        options["stop_strings"] = list(request.stop)
    before = time.perf_counter()
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
        rows = (*generated.rows[:row], tuple(tokens), *generated.rows[row + 1 :])
        trimmed = replace(generated, rows=rows)
        answers.append(runner.result(prompt, decoder, trimmed, loads[row], (started, before), row))
    return answers


def _load(
    runner: Answerer, prompts: Sequence[Prompt], contexts: Sequence[int], width: int
) -> tuple[Any, list[LoadedContext]]:
    # A row's context ends where its query begins, so index = position + padding everywhere and
    # windows stay right.  The input's columns of shorter queries' rows begin inside their context,
    # which is kept.
    loader = runner.loader
    if loader is None:
        raise InvalidInputError("this model keeps no keys and values; use FullRecompute()")
    request = prompts[0].request
    buffer = runner.room(len(prompts), width + request.max_new_tokens)
    longest = max(len(prompt.query) for prompt in prompts)
    loads = []
    for row, (prompt, context) in enumerate(zip(prompts, contexts, strict=True)):
        offset = width - context - len(prompt.query)
        loads.append(loader.load(buffer, row, offset, prompt.chunks, request.policy.positions))
    keep = torch.tensor([longest - len(prompt.query) for prompt in prompts])
    cache = runner.model.cache(buffer, width - longest, keep.to(runner.model.device))
    return cache if any(contexts) else None, loads
