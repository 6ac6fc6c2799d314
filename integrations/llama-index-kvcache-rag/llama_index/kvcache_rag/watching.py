"""Which nodes were retrieved, and what the answer over them costs, from LlamaIndex's spans.

Its own synthesizers and chat engines join the retrieved nodes to one text and hand the LLM a
template with it.  `watch` listens to which nodes were retrieved and are about to be answered from;
`matching` finds them again in what the LLM is asked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore

from kvcache_rag import InvalidInputError, KVCacheRagError
from kvcache_rag.integration import KnownTexts, Reference
from kvcache_rag.integration.question import Source
from llama_index.kvcache_rag.references import llm_text, warn_of_changes, without_reference

if TYPE_CHECKING:
    import inspect
    from collections.abc import Iterator, Mapping, Sequence

KNOWN: Final = KnownTexts()
"""Of every node that was retrieved in this process.  What is stored, and found in the KV store, is
all the same that of the namespace of the engine that is asked."""

REPORT: Final[ContextVar[dict[str, Any] | None]] = ContextVar("kvcache_rag_report", default=None)
"""What the answer that is being made has cost so far."""

NODES: Final[ContextVar[Mapping[str, Source]]] = ContextVar(
    "kvcache_rag_nodes", default=MappingProxyType({})
)
"""The nodes that were retrieved last, by the texts by which they may stand in a prompt."""

# What the last answer cost.
_shown: ContextVar[dict[str, Any] | None] = ContextVar("kvcache_rag_shown", default=None)
# How many synthesizers, one within the other, are at work.
_synthesizers: ContextVar[int] = ContextVar("kvcache_rag_synthesizers", default=0)


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
            llm: Any = getattr(instance, "_llm", None)
            if getattr(llm, "match_chunks", False):
                for one in nodes:
                    if isinstance(one, NodeWithScore):
                        text = llm_text(without_reference(one.node))
                        warn_of_changes(one.node, text, llm.watch)
            REPORT.set({} if nodes else None)
            _shown.set(None)
        elif isinstance(instance, BaseChatEngine):
            REPORT.set(None)
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
            report = REPORT.get()
            REPORT.set(None)
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
        REPORT.set(None)


def _left(instance: Any) -> None:
    if isinstance(instance, BaseSynthesizer):
        _synthesizers.set(max(0, _synthesizers.get() - 1))


def _know_all(nodes: Sequence[Any]) -> None:
    found: dict[str, Source] = {}
    for place, one in enumerate(nodes):
        if isinstance(one, NodeWithScore):
            for text in know(one.node):
                found.setdefault(text, Source(text, one.node.node_id, one.score, place))
    if found:
        NODES.set(found)


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
    before = REPORT.get()
    REPORT.set(report)
    try:
        yield
    finally:
        REPORT.set(before)


@lru_cache(maxsize=1)
def watch() -> None:
    """Listen to LlamaIndex's spans from now on."""
    get_dispatcher().add_span_handler(_Watch())


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
