"""Run transformers' own `generate()` over an already filled cache, and watch it.

One greedy answer takes a shorter way to the same tokens (`models/decode.py`).  The full ids are
passed with the cache, so that sampling, stopping and every logits processor see what they would see
without us.
"""

from __future__ import annotations

import copy
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Real
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvcache_rag.errors import InvalidInputError, UnsupportedModelError, refuse_unknown
from kvcache_rag.models.cache import CACHE_NAME, RecurrentCache
from kvcache_rag.models.decode import decode, decodes
from kvcache_rag.models.language import StoppedError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from kvcache_rag.models.language import LanguageModel


# Wrong tokens from any prefilled cache in transformers itself (measured with 5.23), so they are
# refused.
_REFUSED = (
    "assistant_model",
    "assistant_early_exit",
    "custom_generate",
)

# What transformers keeps as code on the hub, or what is not done from a filled cache.
_ABSENT = {
    "constraints": "constrained beam search",
    "dola_layers": "contrasting layers (DoLa)",
    "force_words_ids": "constrained beam search",
    "penalty_alpha": "contrastive search",
    "token_healing": "another end of the prompt",
    "use_mtp": "decoding by heads for several tokens",
}

_LOOKUP = "a whole number, 0 for no guesses from the prompt"
_WHOLE = (int, "a whole number")
_NUMBER = (Real, "a number")
_FUNCTIONS = ((list, tuple), "a list of functions")

# What `generate()` looks at only when it needs it.
_VALUES: Final[dict[str, tuple[Any, str]]] = {
    "diversity_penalty": _NUMBER,
    "encoder_no_repeat_ngram_size": _WHOLE,
    "encoder_repetition_penalty": _NUMBER,
    "eos_token_id": ((int, list, tuple), "the number of a token, or a list of them"),
    "epsilon_cutoff": _NUMBER,
    "eta_cutoff": _NUMBER,
    "guidance_scale": _NUMBER,
    "length_penalty": _NUMBER,
    "logits_processor": _FUNCTIONS,
    "max_time": _NUMBER,
    "min_length": _WHOLE,
    "min_new_tokens": _WHOLE,
    "min_p": _NUMBER,
    "no_repeat_ngram_size": _WHOLE,
    "num_beam_groups": _WHOLE,
    "num_beams": _WHOLE,
    "num_return_sequences": _WHOLE,
    "pad_token_id": (int, "the number of a token"),
    "prefill_chunk_size": _WHOLE,
    "prompt_lookup_num_tokens": (int, _LOOKUP),
    "repetition_penalty": _NUMBER,
    "stop_strings": ((str, list, tuple), "a text, or a list of texts"),
    "stopping_criteria": _FUNCTIONS,
    "top_h": _NUMBER,
    "top_k": _WHOLE,
    "top_p": _NUMBER,
    "typical_p": _NUMBER,
}

_CALL_OPTIONS = (
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
    "synced_gpus",
)

_OWNED = (
    "attention_mask",
    "cache",
    "cache_implementation",
    "cache_position",
    "input_ids",
    "inputs",
    "max_new_tokens",
    "num_assistant_tokens",
    "inputs_embeds",
    "max_length",
    "past_key_values",
    "position_ids",
    "return_dict_in_generate",
    "tokenizer",
    "use_cache",
)


@dataclass(frozen=True)
class Generated:
    """What one `generate()` gave.

    Attributes:
        rows: New token ids per row, the end-of-sequence token included, padding removed.
        first_at: `time.perf_counter()` at the first token.
        ended_at: The same at the end.
        finish_reasons: "stop" or "length" per row.
    """

    rows: tuple[tuple[int, ...], ...]
    first_at: float
    ended_at: float
    finish_reasons: tuple[str, ...]


class _Watch(StoppingCriteria):
    """Notes the time of the first token, hands tokens on, and stops when it is told to.

    Attributes:
        first_at: `time.perf_counter()` at the first token, 0 before.
        ends: Per row after how many tokens it ended, None while it goes on; what follows in a batch
            is padding.
        rows: Per row what came, with that.
    """

    def __init__(
        self,
        ids: Tensor,
        stops: frozenset[int],
        emit: Callable[[int, Sequence[int]], bool] | None,
        cancelled: threading.Event | None,
    ) -> None:
        self.first_at = 0.0
        self.ends: list[int | None] = [None] * len(ids)
        self.rows: list[list[int]] = [[] for _ in ids]
        self._prompt = self._seen = ids.shape[1]
        self._stops, self._emit, self._cancelled = stops, emit, cancelled

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        # Reading the ids waits for the device, so the clock is right there too.
        fresh = input_ids[:, self._seen :].tolist()  # (rows, new ids) as lists
        self._seen = input_ids.shape[1]
        self.first_at = self.first_at or time.perf_counter()
        if self._emit is not None:
            for row, ids in enumerate(fresh):
                self.rows[row] += ids
                if self.ends[row] is not None:
                    continue
                if self._emit(row, ids) or not self._stops.isdisjoint(ids):
                    self.ends[row] = self._seen - self._prompt
        is_over = self._cancelled is not None and self._cancelled.is_set()
        if is_over or self._emit is None:  # of beams there are more than rows
            return torch.full((len(input_ids),), is_over, device=input_ids.device)
        # (rows,) bool, True for what has ended
        return torch.tensor([end is not None for end in self.ends], device=input_ids.device)


def checked_generation(options: dict[str, Any], *, streaming: bool) -> dict[str, Any]:
    """Refuse unknown options, those that would give wrong tokens, and those that the engine sets.

    Settings inside a `generation_config` count like single ones.

    Returns:
        The options, with sampling set from the temperature (on above 0, off at 0) unless
        `do_sample` says otherwise.

    Raises:
        InvalidInputError: Naming the option and what to do.
    """
    config = options.get("generation_config")
    if not isinstance(config, GenerationConfig | None):
        raise InvalidInputError(
            f"generation_config must be a GenerationConfig, not a {type(config).__name__}; give "
            "options one by one"
        )
    settings = {**(config.to_dict() if config is not None else {}), **options}
    _refuse_modes(settings)
    _check_values(settings)
    known = {*vars(GenerationConfig()), *_CALL_OPTIONS}
    for name in options:
        if name in _OWNED:
            raise InvalidInputError(f"{name} is set by the engine; leave it out")
    if not options.keys() <= known:
        refuse_unknown(options, known, "option of generate()")
    if streaming and (settings.get("num_beams") or 1) > 1:
        raise InvalidInputError("beam search cannot stream; use generate, or num_beams=1")
    return _sampling(options)


def _refuse_modes(settings: dict[str, Any]) -> None:
    for name in _REFUSED:
        if settings.get(name) is not None:
            raise InvalidInputError(
                f"{name} gives wrong tokens from a filled cache in transformers itself; leave it "
                "out"
            )
    for name, mode in _ABSENT.items():
        if settings.get(name):
            raise InvalidInputError(f"{name} asks for {mode}, which is not done here; leave it out")


def _check_values(settings: dict[str, Any]) -> None:
    """Refuse what `generate()` would stumble over far from where it was said."""
    for name, (kind, wanted) in _VALUES.items():
        value = settings.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise InvalidInputError(f"{name} must be {wanted}, not {value!r}")
    for name in ("logits_processor", "stopping_criteria"):
        if not all(map(callable, settings.get(name) or ())):
            raise InvalidInputError(f"{name} must be a list of functions, not {settings[name]!r}")
    if (settings.get("prompt_lookup_num_tokens") or 0) < 0:
        lookup = settings["prompt_lookup_num_tokens"]
        raise InvalidInputError(f"prompt_lookup_num_tokens must be {_LOOKUP}, not {lookup!r}")
    for name in ("num_beams", "prefill_chunk_size"):
        if (settings.get(name) or 1) < 1:
            raise InvalidInputError(f"{name} must be positive, not {settings[name]!r}")
    if (settings.get("num_return_sequences") or 1) > 1:
        raise InvalidInputError("num_return_sequences must be 1; call generate several times")
    if (settings.get("num_beam_groups") or 1) > 1:
        raise InvalidInputError("beams in groups are not searched here; leave num_beam_groups out")


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    temperature = options.get("temperature")
    if temperature is None:
        return options
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, Real)
        or not float(temperature) >= 0
    ):
        raise InvalidInputError(f"temperature must be a number from 0 up, not {temperature!r}")
    # Without do_sample, transformers would ignore the temperature with a warning.
    sampled = {"do_sample": float(temperature) > 0, **options, "temperature": float(temperature)}
    if not sampled["do_sample"]:
        del sampled["temperature"]
    return sampled


def uses_beams(options: dict[str, Any]) -> bool:
    """Whether checked options ask for beam search."""
    return beams(options) > 1


def beams(options: dict[str, Any]) -> int:
    """How many beams checked options ask for, 1 for none."""
    config = options.get("generation_config")
    return int(options.get("num_beams") or getattr(config, "num_beams", None) or 1)


def generate(
    model: LanguageModel,
    ids: Tensor,
    mask: Tensor,
    cache: Any,
    *,
    max_new_tokens: int,
    tokenizer: Any,
    options: dict[str, Any],
    emit: Callable[[int, Sequence[int]], bool] | None = None,
    cancelled: threading.Event | None = None,
) -> Generated:
    """Generate from full ids and a cache that covers all but their last columns.

    Args:
        model: The model.
        ids: `(rows, n)` int64, left-padded.
        mask: `(rows, n)` int64, 1 for real tokens.
        cache: A transformers cache, or None for a plain prefill.
        max_new_tokens: At most so many per row.
        tokenizer: Needed by `stop_strings`.
        options: Further arguments of `generate()`.
        emit: Called after each step with the number and the new ids of each row that has not ended;
            True ends the row.  None with beam search, whose rows are known at the end only.
        cancelled: Stops at the next token once set.
    """
    if cache is None:
        cache = model.new_cache(mask, room=max_new_tokens, beams=beams(options))
    with model.computing(), model.interruptible(cancelled):
        return _generate(
            model, ids, mask, cache, max_new_tokens, tokenizer, options, emit, cancelled
        )


def _generate(
    model: LanguageModel,
    ids: Tensor,
    mask: Tensor,
    cache: Any,
    max_new_tokens: int,
    tokenizer: Any,
    options: dict[str, Any],
    emit: Callable[[int, Sequence[int]], bool] | None,
    cancelled: threading.Event | None,
) -> Generated:
    config, arguments = _configured(model, options, max_new_tokens, tokenizer)
    stops = _stop_ids(config.eos_token_id)
    if decodes(model, len(ids), config, arguments, cache):
        with torch.inference_mode():
            decoded = decode(
                model,
                ids,
                cache,
                config=config,
                stops=stops,
                processors=LogitsProcessorList(arguments.get("logits_processor") or ()),
                emit=emit,
                cancelled=cancelled,
            )
        reason = "stop" if decoded.ids and decoded.ids[-1] in stops else "length"
        return Generated((decoded.ids,), decoded.first_at, time.perf_counter(), (reason,))
    # Guesses are of `decode` alone: transformers' own give wrong tokens from a filled cache.
    config.prompt_lookup_num_tokens = None
    watch = _Watch(ids, stops, emit, cancelled)
    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), watch])
    arguments["stopping_criteria"] = criteria
    if cache is not None and len(ids) > 1:
        # What rows hold already of the input's columns is the affair of one first pass.
        config.prefill_chunk_size = None
    if isinstance(cache, RecurrentCache):
        # `generate()` does not ask such a cache what it holds.
        raise UnsupportedModelError(
            f"{model.config.model_type}: from stored chunks a model without attention is decoded "
            "greedily, with max_new_tokens, stop and logits_processor alone; leave out the other "
            "options, or use FullRecompute()"
        )
    if config.stop_strings:
        arguments["tokenizer"] = tokenizer
    if cache is not None:  # where its name is another one, `generate()` would find None under ours
        arguments[CACHE_NAME] = model.taken(cache)
    # A prompt may go through `generate()` in several passes (prefill_chunk_size).
    carried = nullcontext() if model.recurrent is None else model.recurrent.carried()
    try:
        if cache is not None:
            _settle(model, ids, cache, config.num_beams or 1)
        with torch.inference_mode(), _refused_options(options), carried:
            output = _with_default(model.model, config).generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=config,
                **arguments,
            )
        # (rows, n + steps); a row that ended before the others is padded behind its end.
        answers = output[:, ids.shape[1] :].tolist()
    except StoppedError:
        answers = watch.rows
    ended = time.perf_counter()
    rows = tuple(_trim(row, stops)[:end] for row, end in zip(answers, watch.ends, strict=True))
    # Without a stop token, an answer was cut, by its length or its time or a cancellation, unless
    # the caller gave reasons of its own to end it.
    own = bool(options.get("stop_strings") or options.get("stopping_criteria"))
    reasons = tuple(
        "stop"
        if row[-1:] and (row[-1] in stops or (own and len(row) < max_new_tokens))
        else "length"
        for row in rows
    )
    return Generated(rows, watch.first_at or ended, ended, reasons)


@contextmanager
def _refused_options(options: dict[str, Any]) -> Iterator[None]:
    """Say in one sentence what `generate()` itself, not what it calls, makes of its options."""
    try:
        yield
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        if not frames[-1].f_globals.get("__name__", "").startswith("transformers.generation"):
            raise
        raise _unusable(options, error) from error


def _unusable(options: dict[str, Any], error: Exception) -> InvalidInputError:
    reason = " ".join(str(error).split())
    given = ", ".join(options) or "those of its generation_config.json"
    return InvalidInputError(
        f"generate() of transformers cannot use its options, {given}: {reason}"
    )


def _with_default(model: Any, config: GenerationConfig) -> Any:
    """The model with `config` as its own: `generate()` fills what is None from that one.

    Else a sampling temperature or a cache implementation of the model's would come back.  The model
    itself is the app's, which may look at it or save it meanwhile.
    """
    view = copy.copy(model)  # with the same parts
    view.generation_config = config
    return view


def _settle(model: LanguageModel, ids: Tensor, cache: Any, beams: int) -> None:
    """Have a cache hold what `generate()` cannot compute by itself, in as many rows as it wants.

    Several columns behind a state are our passes' affair, and beams share what is computed before.
    """
    held, stop = cache.get_seq_length(), ids.shape[1] - 1
    is_own = model.abilities.memory == "own"
    if held < stop and (model.recurrent is not None or (is_own and beams > 1)):
        with torch.inference_mode():
            model.forward(ids[:, held:stop], cache, torch.arange(held, stop), keep=1)
    if beams > 1:
        # generate() repeats the ids for its beams, but not a cache that it is given.
        cache.batch_repeat_interleave(beams)


def _configured(
    model: LanguageModel, options: dict[str, Any], max_new_tokens: int, tokenizer: Any
) -> tuple[Any, dict[str, Any]]:
    """The model's own generation config with the caller's settings, greedy unless it says so.

    Returns:
        The config, and what of `options` is no setting (logits processors, streamers and the like).
    """
    settings = {key: value for key, value in options.items() if key != "generation_config"}
    config = copy.deepcopy(options.get("generation_config") or model.model.generation_config)
    if "generation_config" not in options:
        # Whoever wants more than one row says so; a filled cache has no more.
        config.num_beams = config.num_return_sequences = config.num_beam_groups = 1
        # Nor is what cannot be done here asked for by what a model's file recommends.
        for name in (*_ABSENT, "assistant_early_exit"):
            setattr(config, name, None)
    if "generation_config" not in options and not settings.get("do_sample"):
        config.do_sample = False
        # transformers warns about sampling settings that greedy search does not read.
        config.temperature = config.top_p = config.top_k = config.min_p = config.typical_p = None
    try:
        rest: dict[str, Any] = config.update(**settings)
    except (AttributeError, ValueError) as error:
        raise _unusable(options, error) from error
    if config.exponential_decay_length_penalty and config.eos_token_id is None:
        raise InvalidInputError(
            "exponential_decay_length_penalty needs an eos_token_id; give one in the "
            "generation_config"
        )
    config.max_new_tokens, config.max_length = max_new_tokens, None
    config.return_dict_in_generate = False
    # The cache is ours, whatever the model's own config prefers.
    config.cache_implementation, config.use_cache = None, True
    if config.pad_token_id is None:
        stops = sorted(_stop_ids(config.eos_token_id))
        padding = tokenizer.pad_token_id
        config.pad_token_id = padding if padding is not None else (stops[0] if stops else 0)
    return config, rest


def _stop_ids(ids: int | Sequence[int] | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _trim(row: list[int], stops: frozenset[int]) -> tuple[int, ...]:
    """Ids up to and with the first end-of-sequence token; what follows in a batch is padding."""
    for index, token in enumerate(row):
        if token in stops:
            return tuple(row[: index + 1])
    return tuple(row)
