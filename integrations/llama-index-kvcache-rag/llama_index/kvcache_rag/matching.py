"""Find chunks in prompts that LlamaIndex packed itself, if only the LLM is ours.

`watching` knows which nodes were retrieved.  `Ask` finds their texts in what the LLM is asked: they
become chunks, and everything else of the prompt is the question behind them.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.prompt_type import PromptType

from kvcache_rag.integration import joined
from kvcache_rag.integration.question import Source, as_chunks
from llama_index.kvcache_rag.conversation import Wording, spoken_turns
from llama_index.kvcache_rag.responses import Packed, Prompt
from llama_index.kvcache_rag.watching import KNOWN, NODES, REPORT, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from llama_index.core.base.llms.types import CompletionResponse

    from kvcache_rag.integration import FoundText
    from llama_index.kvcache_rag.settings import LLMSettings

PASTED: Final = "pasted"
_Found: TypeAlias = "Packed | Literal['pasted'] | None"
"""A question over the chunks that were found, a context in which none was, or no context."""

_CONTEXT: Final = "@@kvcache-rag-context@@"
# What LlamaIndex's templates call the joined nodes.
_CONTEXT_NAMES: Final = ("context_str", "context_msg", "context")
_ANSWERING: Final = frozenset(
    (PromptType.QUESTION_ANSWER, PromptType.REFINE, PromptType.SUMMARY, PromptType.CUSTOM)
)
_READ: Final = (MessageRole.SYSTEM, MessageRole.DEVELOPER, MessageRole.USER)
_FEWEST_TO_WARN: Final = 400  # characters, about a hundred tokens
_NOT_FOUND: Final = (
    "nothing in the context of this prompt is the text of a node that was retrieved, so it is "
    "computed anew for every question; answer with KVCacheQueryEngine or KVCacheSynthesizer, which "
    "are handed the nodes themselves, or silence this with KVCacheLLM(match_chunks=False)"
)


_planned: ContextVar[tuple[_Found, ...]] = ContextVar("kvcache_rag_planned", default=())


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
    adds_up = isinstance(one, (int, float, list)) and not isinstance(one, bool)
    return one + other if adds_up else other


@dataclass(frozen=True)
class Ask:
    """A call of the LLM, as LlamaIndex makes it.

    Attributes:
        template: What was found in the template that LlamaIndex writes; empty if it writes none.
        report: Of the answer that the call is part of.
        nodes: That were retrieved for it, by their texts.
    """

    template: tuple[_Found, ...]
    report: dict[str, Any] | None
    nodes: Mapping[str, Source]

    @classmethod
    def now(cls) -> Ask:
        """The call that is being made; to be read before a thread or a stream takes over."""
        return cls(_planned.get(), REPORT.get(), NODES.get())

    def prompt(
        self, llm: LLMSettings, messages: Sequence[ChatMessage], write: Callable[[], str]
    ) -> Prompt:
        """What the engine is to answer.

        Args:
            llm: Is asked.
            messages: What it is asked; none if that is a text which must stay as it is.
            write: Writes it as one text.
        """
        found = self.template[0] if self.template else _of_messages(llm, messages, self.nodes)
        if isinstance(found, Packed):
            return replace(found, pasted=write)
        return Prompt.text(write(), "plain" if found is None else PASTED)

    def note(self, response: CompletionResponse) -> CompletionResponse:
        """Add what the answer cost to the report; gives the response.

        The report numbers nodes as they were retrieved, the response as they stand in the prompt.
        """
        if self.report is not None and isinstance(response.raw, dict):
            report, places = self.report, {one.id: one.place for one in self.nodes.values()}
            cost, known = response.raw["kv_cache"], report.get("answered_from_ids", ())
            ids = [one for one in cost["answered_from_ids"] if one in places and one not in known]
            numbers = [places[one] for one in ids]
            node_of = dict(zip(cost["answered_from"], cost["answered_from_ids"], strict=True))
            missed = [
                {**one, "chunk": places[node_of[one["chunk"]]]}
                for one in cost["missed"]
                if node_of.get(one["chunk"]) in places
            ]
            numbered = {"answered_from": numbers, "answered_from_ids": ids, "missed": missed}
            metrics = {**cost, **numbered}
            both = {name: _sum(report[name], metrics[name]) for name in metrics if name in report}
            report.update({**metrics, **both})
        return response


@contextmanager
def writing(
    llm: LLMSettings, template: BasePromptTemplate, values: Mapping[str, Any]
) -> Iterator[None]:
    """While LlamaIndex writes a template and hands the text to `llm`."""
    with told():
        token = _planned.set((_of_template(llm, template, values),))
        try:
            yield
        finally:
            _planned.reset(token)


def _of_template(
    llm: LLMSettings, template: BasePromptTemplate, values: Mapping[str, Any]
) -> _Found:
    names = [name for name in _CONTEXT_NAMES if values.get(name)]
    is_answer = template.metadata.get("prompt_type") in _ANSWERING
    is_parsed = template.output_parser is not None or llm.output_parser is not None
    if len(names) != 1 or not is_answer or is_parsed:
        return None
    if template.get_template(llm=llm) in _of_judges():
        return None
    # `SimpleSummarize` hands over a list.
    given = values[names[0]]
    context = given if isinstance(given, str) else "\n".join(map(str, given))
    found = found_in(context, llm)
    if not found:
        # Without a question it is what extractors ask of a node at ingestion.
        is_question = "query_str" in template.template_vars
        if llm.match_chunks and is_question and len(context) >= _FEWEST_TO_WARN:
            llm.warn_once(_NOT_FOUND)
        return PASTED
    messages = template.format_messages(llm=llm, **{**values, names[0]: _CONTEXT})
    asked = str({**template.kwargs, **values}.get("query_str") or "")
    rest = _without(context, found)
    return _grounded(llm, messages, rest, found, NODES.get(), asked=asked) or PASTED


def _of_messages(
    llm: LLMSettings, messages: Sequence[ChatMessage], nodes: Mapping[str, Source]
) -> _Found:
    """The same for messages that an app wrote itself."""
    cut: list[ChatMessage] = []
    every: list[FoundText] = []
    gaps = ""
    for message in messages:
        text = message.content or ""
        found = found_in(text, llm) if message.role in _READ else []
        if found:
            between = _without(text[: found[-1].end], found)[found[0].start :]
            gaps += between + text[: found[0].start] if every else between
            mark = "" if every else _CONTEXT
            left = f"{text[: found[0].start]}{mark}{between}{text[found[-1].end :]}"
            message = ChatMessage(role=message.role, content=left)
            every += found
        cut.append(message)
    return _grounded(llm, cut, "", every, nodes, gaps) if every else None


def _grounded(
    llm: LLMSettings,
    messages: Sequence[ChatMessage],
    rest: str,
    found: Sequence[FoundText],
    nodes: Mapping[str, Source],
    gaps: str = "",
    *,
    asked: str = "",
) -> Packed | None:
    """A question over chunks.

    Args:
        llm: Is asked.
        messages: With a mark where the first chunk stood.
        rest: What the mark stands for besides chunks.
        found: The chunks.
        nodes: That were retrieved, by their texts.
        gaps: What stood between them elsewhere.
        asked: What is asked; "" for the last that was said.

    Returns:
        None if the mark stands where a chunk cannot be taken away, or nothing is left to ask.
    """
    engine, turns = llm.engine, spoken_turns(messages)
    said = joined(one for one in turns if one["role"] != "system")
    if not said or said[-1]["role"] != "user":
        return None
    unanswered, wording = said[-1]["content"], Wording.from_query(turns, engine)
    before, mark, behind = wording.question.partition(_CONTEXT)
    question = f"{before}{rest}{behind}".strip()
    if not mark or not question:
        return None
    sources, scores = as_chunks([[source_of(one, nodes) for one in found]])
    numbered = in_prompt(sources)
    is_after_turns = bool(wording.history) and _CONTEXT in unanswered
    return Packed.over(
        question,
        numbered,
        [one.chunk(engine) for one in numbered],
        prefix_mismatch=is_after_turns or bool((before + rest + gaps).strip()),
        overflow="error",
        scores=scores,
        history=wording.history,
        asked=asked or unanswered.replace(_CONTEXT, ""),
    )


def source_of(found: FoundText, nodes: Mapping[str, Source]) -> Source:
    """The node of a text that was found; without an id if it was not retrieved last."""
    known = nodes.get(found.text) or Source(found.text)
    return replace(known, reference=found.reference)


def in_prompt(sources: Sequence[Source]) -> tuple[Source, ...]:
    """Sources numbered as they stand in the prompt, where nobody handed over a list of nodes."""
    return tuple(replace(one, place=at) for at, one in enumerate(sources))


def found_in(text: str, llm: LLMSettings) -> list[FoundText]:
    """Texts of retrieved nodes in a text, as far as `llm` may look for them."""
    # A prompt in a form of the user's own is answered in that form.
    return KNOWN.find(text) if llm.match_chunks and not llm.has_own_form else []


def _without(text: str, found: Sequence[FoundText]) -> str:
    """A text without what was found in it."""
    ends = [0, *(one.end for one in found)]
    starts = [*(one.start for one in found), len(text)]
    return "".join(text[end:start] for end, start in zip(ends, starts, strict=True))


def _of_judges() -> frozenset[str]:
    """Templates by which LlamaIndex's evaluators ask: a judgement is no approximation."""
    return _judging() if "llama_index.core.evaluation" in sys.modules else frozenset()


@lru_cache(maxsize=1)
def _judging() -> frozenset[str]:
    from llama_index.core import evaluation

    places = [
        vars(module) for name, module in sys.modules.items() if name.startswith(evaluation.__name__)
    ]
    values = [value for place in places for value in place.values()]
    values += [one for value in values if isinstance(value, dict) for one in value.values()]
    templates = [value for value in values if isinstance(value, BasePromptTemplate)]
    # Other types are those of questions, which some of these modules ask in other places.
    custom = [one for one in templates if one.metadata.get("prompt_type") == PromptType.CUSTOM]
    return frozenset(one.get_template() for one in custom)
