"""Decode one answer greedily, without the general work of `generate()` at every token.

`generate()` is the law: where it is asked for anything that is not written here, it runs instead
(`models/generate.py`), and what comes from here is what it would say.  Of several guessed tokens
(`models/prompt_lookup.py`) those stay that the model says itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.models.cache import (
    RecurrentCache,
    remembered,
    rewind,
    stock_cache,
    takes_back,
)
from kvcache_rag.models.language import StoppedError
from kvcache_rag.models.prompt_lookup import PromptLookup

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from transformers import GenerationConfig, LogitsProcessorList

    from kvcache_rag.models.cache import States
    from kvcache_rag.models.language import LanguageModel

# Settings that are heeded here, or that change nothing for one greedy answer.
_HEEDED: Final = frozenset(
    {
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bos_token_id",
        "compile_config",
        "decoder_start_token_id",
        "diversity_penalty",
        "early_stopping",
        "eos_token_id",
        "is_assistant",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "max_time",
        "min_new_tokens",
        "min_p",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "pad_token_id",
        "prompt_lookup_num_tokens",
        "return_dict_in_generate",
        "target_lookbehind",
        "temperature",
        "top_k",
        "top_p",
        "transformers_version",
        "typical_p",
        "use_cache",
        "_from_model_config",
        "_original_object_hash",
    }
)

# What these settings are where they do nothing, if not None, False or 0.
_INERT: Final = {
    "epsilon_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "eta_cutoff": (0.0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
}

_STOCK: Final = ("generate", "prepare_inputs_for_generation")

# Most tokens of a guess when nothing else is said.
LOOKUP: Final = 10


@dataclass(frozen=True)
class Decoded:
    """What was said.

    Attributes:
        ids: New tokens, the one that ended it included.
        first_at: `time.perf_counter()` at the first.
        passes: Forward passes.
    """

    ids: tuple[int, ...]
    first_at: float
    passes: int


def decodes(
    model: LanguageModel,
    rows: int,
    config: GenerationConfig,
    rest: dict[str, Any],
    cache: Any = None,
) -> bool:
    """Whether `decode` gives what `generate()` would, so far as its settings go.

    Args:
        model: The model.
        rows: Prompts.
        config: Checked settings.
        rest: Arguments of `generate()` that are no settings.
        cache: What it would begin at.
    """
    return (
        rows == 1
        and not config.do_sample
        and rest.keys() <= {"logits_processor"}
        and (
            model.abilities.memory == "own"
            or isinstance(cache, RecurrentCache)
            or (model.takes_positions and _is_stock(model.model))
        )
        and all(
            name in _HEEDED or not value or value in _INERT.get(name, ())
            for name, value in vars(config).items()
        )
    )


def _is_stock(model: Any) -> bool:
    """Whether a model neither generates nor prepares its inputs in a way of its own."""
    from transformers import GenerationMixin  # loads much, and not everybody needs it

    kind = type(model)
    return (
        all(getattr(kind, name, None) is getattr(GenerationMixin, name) for name in _STOCK)
        and not any(name in vars(model) for name in _STOCK)
        # Some models make a cache of a class of their own.
        and getattr(kind, "_supports_default_dynamic_cache", lambda: True)()
    )


def decode(
    model: LanguageModel,
    ids: Tensor,
    cache: Any,
    *,
    config: GenerationConfig,
    stops: frozenset[int],
    processors: LogitsProcessorList,
    emit: Callable[[int, Sequence[int]], bool] | None,
    cancelled: threading.Event | None,
) -> Decoded:
    """Decode one prompt greedily.

    Args:
        model: The model.
        ids: `(1, n)` int64.
        cache: A transformers cache of all but its last columns, or None for a plain prefill.
        config: Settings that `decodes` takes.
        stops: Tokens that end the answer.
        processors: Of the caller; they see all ids so far and `(1, vocabulary)` float32 logits.
        emit: Called with row 0 and each token; True ends the answer.
        cancelled: Stops at the next token once set.
    """
    begun, said, passes = time.perf_counter(), list[int](), 0
    whole, held = ids, 0 if cache is None else cache.get_seq_length()
    if cache is None:
        cache = stock_cache(model.model.config)
    fresh = ids[:, held:]  # (1, tokens) that the next pass computes
    course = _CacheProgress(cache, held)
    drafts: PromptLookup | None = None
    guessed: list[int] = []
    first_at = 0.0
    while True:
        course.begin(guessed)
        positions = torch.arange(course.held, course.held + fresh.shape[1])
        try:
            logits = model.forward(fresh, cache, positions, keep=len(guessed) + 1)
        except StoppedError:
            return Decoded(tuple(said), first_at or time.perf_counter(), passes)
        passes += 1
        tokens = _chosen(logits[0], whole, len(said), config, stops, processors)
        right = 0
        while right < len(guessed) and guessed[right] == tokens[right]:
            right += 1
        course.advance(fresh[0].tolist(), wrong=len(guessed) - right)
        first_at = first_at or time.perf_counter()
        for token in tokens[: right + 1]:
            said.append(token)
            ends = token in stops or len(said) == config.max_new_tokens
            ends |= bool(emit is not None and emit(0, [token]))
            ends |= cancelled is not None and cancelled.is_set()
            ends |= config.max_time is not None and time.perf_counter() - begun > config.max_time
            if ends:
                return Decoded(tuple(said), first_at, passes)
        newest = said[len(said) - right - 1 :]
        if processors:
            whole = torch.cat([whole, torch.tensor([newest], device=whole.device)], 1)
        room = config.max_new_tokens - len(said) - 1
        if passes == 1 and room:  # now that the first token is out
            drafts = _drafts(model, ids[0], cache, config, processors)
        if drafts is not None:
            drafts.record_outcome(len(guessed), right)
            drafts.extend(newest)
            guessed = drafts.guess(room)
        fresh = torch.tensor([[*course.again, said[-1], *guessed]])


class _CacheProgress:
    """How far a cache is, and how it goes back from a wrong guess.

    Keys and values of wrong tokens are dropped.  A recurrent layer goes back to where it was before
    the guess, and the tokens that were right are told it again, in the next pass.

    Attributes:
        held: Tokens that the cache holds.
        again: Ids that the next pass has to begin with.
    """

    def __init__(self, cache: Any, held: int) -> None:
        self.held, self.again = held, list[int]()
        self._cache = cache
        self._before: States = {}

    def begin(self, guessed: Sequence[int]) -> None:
        """A pass begins that looks at so many guessed tokens."""
        if guessed and not self._before:
            self._before = remembered(self._cache)

    def advance(self, fresh: list[int], *, wrong: int) -> None:
        """A pass took these tokens, of which the last ones were wrong guesses."""
        if wrong and self._before:
            rewind(self._cache, self._before, len(fresh))
            self.again = fresh[: len(fresh) - wrong]
            return
        self.held += len(fresh) - wrong
        if wrong:
            self._cache.crop(-wrong)
        self._before, self.again = {}, []


def _drafts(
    model: LanguageModel,
    prompt: Tensor,
    cache: Any,
    config: GenerationConfig,
    processors: LogitsProcessorList,
) -> PromptLookup | None:
    asked = config.prompt_lookup_num_tokens
    limit = LOOKUP if asked is None else int(asked)
    if not limit or processors or not takes_back(cache):
        return None
    return PromptLookup(prompt, limit, model.row_cost)


def _chosen(
    logits: Tensor,
    whole: Tensor,
    said: int,
    config: GenerationConfig,
    stops: frozenset[int],
    processors: LogitsProcessorList,
) -> list[int]:
    """The likeliest token at each of the places of `logits`, `(places, vocabulary)`."""
    soonest = config.min_new_tokens or 0
    if processors or said < soonest:
        logits = logits.to(torch.float32, copy=True)
        known = [token for token in stops if token < logits.shape[-1]]
        for place in range(min(len(logits), soonest - said)):
            logits[place, known] = -torch.inf
    if processors:  # one place only: nothing is guessed then
        logits = processors(whole, logits)  # type: ignore[arg-type]  # int64, as it wants
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens
