"""Chunks in prompts that LlamaIndex packed by itself, where only the LLM is ours.

Its own synthesizers and chat engines join the retrieved nodes to one text and hand the LLM a
template with it.  `watch` listens to which nodes were retrieved and are about to be answered from
(LlamaIndex's spans tell), and `Ask` finds their texts again: they become chunks, and everything
else of the prompt is the question behind them.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.prompt_type import PromptType
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore

from kvcache_rag import InvalidInputError, KVCacheRagError
from kvcache_rag.integration import KnownTexts, Reference, whole_scores
from llama_index.kvcache_rag.conversation import Conversation
from llama_index.kvcache_rag.references import llm_text, warn_of_changes, without_reference
from llama_index.kvcache_rag.responses import Grounded, Pasted

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from llama_index.core.base.llms.types import CompletionResponse

    from kvcache_rag import Engine
    from kvcache_rag.generation import StoredChunk
    from kvcache_rag.integration import FoundText
    from llama_index.kvcache_rag.llm import KVCacheLLM
    from llama_index.kvcache_rag.responses import Prompt

KNOWN: Final = KnownTexts()
"""Of every node that was retrieved in this process.  What is stored, and found in the KV store, is
all the same that of the namespace of the engine that is asked."""

PASTED: Final = "pasted"
_Found: TypeAlias = "Grounded | Literal['pasted'] | None"
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


class KnownNode(NamedTuple):
    """A node that was retrieved.

    Attributes:
        id: Its own.
        place: Its number among those that were retrieved with it.
        score: If it has one.
    """

    id: str
    place: int
    score: float | None


_planned: ContextVar[tuple[_Found, ...]] = ContextVar("kvcache_rag_planned", default=())
# What the answer that is being made has cost so far, and what the last one did.
_report: ContextVar[dict[str, Any] | None] = ContextVar("kvcache_rag_report", default=None)
_shown: ContextVar[dict[str, Any] | None] = ContextVar("kvcache_rag_shown", default=None)
# The nodes that were retrieved last, by the texts by which they may stand in a prompt.
_nodes: ContextVar[Mapping[str, KnownNode]] = ContextVar(
    "kvcache_rag_nodes", default=MappingProxyType({})
)
# How many synthesizers, one within the other, are at work.
_synthesizers: ContextVar[int] = ContextVar("kvcache_rag_synthesizers", default=0)


# ---------------------------------------------------------------------- which nodes there are
def know(node: Any) -> tuple[str, str]:
    """Remember the texts by which a node may stand in a prompt, and give them."""
    text = llm_text(without_reference(node))
    KNOWN.note(text, Reference.from_metadata(node.metadata))
    bare = node.get_content(metadata_mode=MetadataMode.NONE)
    if bare != text:
        KNOWN.note(bare)
    return text, bare


class _Watch(BaseSpanHandler[BaseSpan]):
    """Sees the nodes that retrievers give and synthesizers get; keeps no spans."""

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if isinstance(instance, BaseSynthesizer):
            _synthesizers.set(_synthesizers.get() + 1)
        nodes = bound_args.arguments.get("nodes")
        if isinstance(instance, BaseSynthesizer) and isinstance(nodes, list):
            _know_all(nodes)
            llm = getattr(instance, "_llm", None)
            if getattr(llm, "match_chunks", False):
                _warn_of_changes(nodes, llm)
            _report.set({} if nodes else None)
            _shown.set(None)
        elif isinstance(instance, BaseChatEngine):
            _report.set(None)
            _shown.set(None)

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **_: Any,
    ) -> None:
        _left(instance)
        if isinstance(result, list):
            _know_all(result)
        elif isinstance(instance, BaseSynthesizer) and hasattr(result, "source_nodes"):
            report = _report.get()
            _report.set(None)
            if report is not None:  # else it was the span of a method that the method calls
                _show(result, report)
                _shown.set(report)
                _read_into(report, result)
        elif isinstance(instance, BaseChatEngine):
            _show(result, _shown.get())

    def prepare_to_drop_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        err: BaseException | None = None,
        **_: Any,
    ) -> None:
        _left(instance)
        _report.set(None)


def _left(instance: Any) -> None:
    if isinstance(instance, BaseSynthesizer):
        _synthesizers.set(max(0, _synthesizers.get() - 1))


def _know_all(nodes: Sequence[Any]) -> None:
    found: dict[str, KnownNode] = {}
    for place, one in enumerate(nodes):
        if isinstance(one, NodeWithScore):
            for text in know(one.node):
                found.setdefault(text, KnownNode(one.node.node_id, place, one.score))
    if found:
        _nodes.set(found)


def _warn_of_changes(nodes: Sequence[Any], llm: Any) -> None:
    for one in nodes:
        if isinstance(one, NodeWithScore):
            warn_of_changes(one.node, llm_text(without_reference(one.node)), llm.watch)


def _show(response: Any, report: dict[str, Any] | None) -> None:
    """Put what an answer cost where the user looks for it, if it does not stand there already."""
    if report is not None and (report or _is_stream(response)):
        response.metadata = {"kv_cache": report, **(getattr(response, "metadata", None) or {})}


def _is_stream(response: Any) -> bool:
    return not isinstance(response, (Response, PydanticResponse, AgentChatResponse))


def _read_into(report: dict[str, Any], response: Any) -> None:
    """Have the stream of a response, which asks the LLM when it is read, add what it costs."""
    items = getattr(response, "response_gen", None)
    if isinstance(items, AsyncGenerator):
        response.response_gen = _aread(items, report)
    elif isinstance(items, Generator):
        response.response_gen = _read(items, report)


def _read(items: Generator[Any, None, None], report: dict[str, Any]) -> Generator[Any, None, None]:
    with closing(items):
        while True:
            with _reporting(report):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


async def _aread(
    items: AsyncGenerator[Any, None], report: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    async with aclosing(items):
        while True:
            with _reporting(report):
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            yield item


@contextmanager
def _reporting(report: dict[str, Any]) -> Iterator[None]:
    """While a stream is read, and no longer: what is asked between two pieces is another's."""
    before = _report.get()
    _report.set(report)
    try:
        yield
    finally:
        _report.set(before)


@lru_cache(maxsize=1)
def watch() -> None:
    """Listen to LlamaIndex's spans from now on."""
    get_dispatcher().add_span_handler(_Watch())


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
    adds_up = isinstance(one, (int, float, list)) and not isinstance(one, bool)
    return one + other if adds_up else other


# ---------------------------------------------------------------------- what is asked of the LLM
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
    nodes: Mapping[str, KnownNode]

    @classmethod
    def now(cls) -> Ask:
        """The call that is being made; to be read before a thread or a stream takes over."""
        return cls(_planned.get(), _report.get(), _nodes.get())

    def prompt(
        self, llm: KVCacheLLM, messages: Sequence[ChatMessage], write: Callable[[], str]
    ) -> Prompt:
        """What the engine is to answer.

        Args:
            llm: Is asked.
            messages: What it is asked; none if that is a text which must stay as it is.
            write: Writes it as one text.
        """
        found = self.template[0] if self.template else _of_messages(llm, messages, self.nodes)
        if isinstance(found, Grounded):
            return replace(found, pasted=write)
        return write() if found is None else Pasted(write())

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
def told() -> Iterator[None]:
    """While LlamaIndex asks the LLM: what is refused reaches whoever asked.

    A synthesizer of LlamaIndex takes every ValueError for an answer that cannot be parsed, and says
    "Empty Response" instead of it.
    """
    try:
        yield
    except InvalidInputError as error:
        if not _synthesizers.get():
            raise
        raise KVCacheRagError(str(error)) from error


@contextmanager
def writing(
    llm: KVCacheLLM, template: BasePromptTemplate, values: Mapping[str, Any]
) -> Iterator[None]:
    """While LlamaIndex writes a template and hands the text to `llm`."""
    with told():
        token = _planned.set((_of_template(llm, template, values),))
        try:
            yield
        finally:
            _planned.reset(token)


def _of_template(
    llm: KVCacheLLM, template: BasePromptTemplate, values: Mapping[str, Any]
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
    return _grounded(llm, messages, rest, found, _nodes.get(), asked=asked) or PASTED


def _of_messages(
    llm: KVCacheLLM, messages: Sequence[ChatMessage], nodes: Mapping[str, KnownNode]
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
    llm: KVCacheLLM,
    messages: Sequence[ChatMessage],
    rest: str,
    found: Sequence[FoundText],
    nodes: Mapping[str, KnownNode],
    gaps: str = "",
    *,
    asked: str = "",
) -> Grounded | None:
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
    engine = llm.engine
    chunks = [*{one.text: one for one in found}.values()]  # what is read twice says no more
    spoken = Conversation.of(messages, engine)
    before, mark, behind = "\n\n".join([*spoken.instructions, *spoken.unanswered]).partition(
        _CONTEXT
    )
    question = f"{before}{rest}{behind}".strip()
    if not mark or not spoken.unanswered or not question:
        return None
    is_after_turns = bool(spoken.turns) and _CONTEXT in spoken.unanswered[0]
    return Grounded(
        question,
        tuple(chunk_of(one, engine) for one in chunks),
        overflow="error",
        prefix_mismatch=is_after_turns or bool((before + rest + gaps).strip()),
        scores=scores_of(chunks, nodes),
        history=spoken.turns,
        nodes=ids_of(chunks, nodes),
        asked=asked or spoken.unanswered[0].replace(_CONTEXT, ""),
    )


def scores_of(
    found: Sequence[FoundText], nodes: Mapping[str, KnownNode]
) -> tuple[float, ...] | None:
    """Scores of texts that were found, if all have one."""
    known = (nodes.get(one.text) for one in found)
    return whole_scores(None if one is None else one.score for one in known)


def ids_of(found: Sequence[FoundText], nodes: Mapping[str, KnownNode]) -> tuple[str, ...]:
    """Ids of the nodes of texts that were found, "" of one that was not retrieved last."""
    return tuple(nodes[one.text].id if one.text in nodes else "" for one in found)


def chunk_of(found: FoundText, engine: Engine) -> StoredChunk | str:
    """What to hand to the engine for a text that was found."""
    return found.text if found.reference is None else found.reference.chunk(found.text, engine)


def found_in(text: str, llm: KVCacheLLM) -> list[FoundText]:
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
