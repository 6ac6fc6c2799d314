"""The keyword arguments of `Engine.generate` and its siblings, each declared once.

Type checkers read them out of `Unpack`; `inspect.signature`, and so `help()` and notebooks, out of
what `shows` writes into a method.
"""

from __future__ import annotations

from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from kvcache_rag.generation.request import Overflow
    from kvcache_rag.policies.base import ReusePolicy
    from kvcache_rag.prompt.template import Message

_Method = TypeVar("_Method", bound="Callable[..., Any]")


class CompletionOptions(TypedDict, total=False):
    """How an answer is generated: greedily, unless `temperature` or `do_sample` says otherwise.

    Other arguments of transformers' `generate()` are accepted too; type checkers know only these.

    Attributes:
        max_new_tokens: Most tokens of the answer (128).
        stop: Strings before which the answer ends.
        skip_special_tokens: False keeps control tokens in the text.
        emit: Called with each piece of text as it comes.
        cancelled: Once set, stops generation.
        temperature: Above 0, tokens are sampled.
        do_sample: Whether to sample.
        top_k: How many tokens to sample from.
        top_p: Probability of the nucleus to sample from.
        min_p: Least share of the likeliest token's probability.
        repetition_penalty: Above 1, avoids repetition.
        no_repeat_ngram_size: No run of so many tokens occurs twice.
        num_beams: Above 1, beam search.
        min_new_tokens: Fewest tokens of the answer.
        max_time: Seconds.
        eos_token_id: Ids that end the answer.
        prompt_lookup_num_tokens: Most tokens guessed from the prompt; 0 for none.
        generation_config: Replaces the model's own.
        logits_processor: Functions of ids and logits.
        stopping_criteria: Functions that end the answer.
        none_below: See `EngineSettings`, for this answer; a text without chunks is continued
            anyway.
    """

    max_new_tokens: int
    stop: Sequence[str]
    skip_special_tokens: bool
    emit: Callable[[str], None] | None
    cancelled: threading.Event | None
    temperature: float | None
    do_sample: bool | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    num_beams: int | None
    min_new_tokens: int | None
    max_time: float | None
    eos_token_id: int | Sequence[int] | None
    prompt_lookup_num_tokens: int | None
    generation_config: Any  # transformers' `GenerationConfig`, which only `models` imports
    logits_processor: Sequence[Callable[..., Any]] | None
    stopping_criteria: Sequence[Callable[..., Any]] | None
    none_below: float | None


class AnswerOptions(CompletionOptions, total=False):
    """How a question over chunks is answered.

    Attributes:
        policy: A policy, or its name such as "cacheblend:0.2"; the engine's if not given.
        history: Earlier turns, oldest first; they come after the chunks.
        overflow: When the chunks do not fit, "error" (the default) raises, "drop_lowest" leaves out
            the worst, and "refine" answers in several rounds.
        scores: Score of each chunk, higher is better, if they are not best first; for "drop_lowest"
            and policies that ask which is best.
        asked: The bare question, by which a policy may choose chunks, if `question` has more in it,
            such as an instruction or a tool's result.
        tools: Tools that the chat template describes.
        chat_template_kwargs: Values of the chat template's variables.
        prefix_mismatch: Whether the caller wanted another text before the chunks; noted in the
            metrics.
    """

    policy: ReusePolicy | str | None
    history: Sequence[Message | Mapping[str, Any]] | None
    overflow: Overflow
    scores: Sequence[float] | None
    asked: str
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    prefix_mismatch: bool


def without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without an `emit` and a `cancelled` that are None, for what takes neither."""
    return {
        name: value
        for name, value in options.items()
        if value is not None or name not in ("emit", "cancelled")
    }


def shows(options: type[CompletionOptions]) -> Callable[[_Method], _Method]:
    """Let the signature of a method with `**options` name them, each with `...` for its default."""
    keywords = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=..., annotation=one.__forward_arg__)
        for name, one in options.__annotations__.items()
    ]

    def shown(method: _Method) -> _Method:
        own = signature(method)
        *parameters, rest = own.parameters.values()
        rest = rest.replace(annotation="Any")
        told: Any = method
        told.__signature__ = own.replace(parameters=[*parameters, *keywords, rest])
        return method

    return shown
