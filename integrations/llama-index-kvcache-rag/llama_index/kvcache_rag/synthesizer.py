"""A response synthesizer that passes the engine chunks instead of one packed text.

LlamaIndex's own synthesizers join the chunks and so lose where one ends.  This one passes the
retrieved nodes through: a node whose reference still fits its text is loaded by reference, any
other by its text.
"""

from __future__ import annotations

import asyncio
import copy
from contextlib import aclosing, closing
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.llm import LLMPredictEndEvent, LLMPredictStartEvent
from llama_index.core.instrumentation.events.synthesis import (
    GetResponseEndEvent,
    GetResponseStartEvent,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers.base import BaseSynthesizer

from kvcache_rag import InvalidInputError, Metrics
from kvcache_rag.errors import arguments_of
from kvcache_rag.integration import given_policy, json_instruction, refuse_unknown, said
from kvcache_rag.integration.question import Source, as_chunks
from llama_index.kvcache_rag.conversation import Mismatches, Wording, spoken_turns
from llama_index.kvcache_rag.defaults import kv_llm_with_class
from llama_index.kvcache_rag.events import KVCacheReuseEvent
from llama_index.kvcache_rag.prompts import Task, own_template, plain_prompt, written_prompt
from llama_index.kvcache_rag.references import source_of, warn_of_changes
from llama_index.kvcache_rag.responses import Prompt
from llama_index.kvcache_rag.structured import class_schema

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from llama_index.core.base.llms.types import (
        ChatMessage,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
    )
    from llama_index.core.base.response.schema import RESPONSE_TYPE
    from llama_index.core.bridge.pydantic import BaseModel
    from llama_index.core.llms.llm import LLM
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.core.prompts.mixin import PromptDictType
    from llama_index.core.schema import NodeWithScore, QueryType
    from llama_index.core.types import RESPONSE_TEXT_TYPE
    from typing_extensions import Self

    from kvcache_rag.policies import ReusePolicy

dispatcher = get_dispatcher(__name__)

FURTHER: Final = ("callback_manager", "empty_response", "prompt_helper", "chat_prompt_helper")
"""Arguments that every LlamaIndex synthesizer takes."""
# Those that the base class takes: that of chats came with llama-index-core 0.14.22.
_HELPERS: Final = {
    name: helper
    for name, helper in (("prompt_helper", PromptHelper), ("chat_prompt_helper", ChatPromptHelper))
    if name in signature(BaseSynthesizer).parameters
}


class KVCacheSynthesizer(BaseSynthesizer):
    """Answers from retrieved nodes, reusing the KV of their chunks.

    The metrics of an answer are in `response.metadata["kv_cache"]`, for a stream once it has ended.
    `["answered_from"]` has the places in `response.source_nodes` of the nodes it was computed from,
    `["answered_from_ids"]` their ids.  A chat's earlier messages come after the chunks, so chunks
    are reused in every turn.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        policy: ReusePolicy | str | None = None,
        overflow: str = "refine",
        text_qa_template: BasePromptTemplate | None = None,
        chat_history: Sequence[ChatMessage] = (),
        generate_kwargs: dict[str, Any] | None = None,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        multimodal: bool = False,
        **options: Any,
    ) -> None:
        """Bind an LLM.

        Args:
            llm: A `KVCacheLLM`, or the result of its `as_structured_llm`; None for `Settings.llm`.
            policy: A policy or its name; None for the LLM's.
            overflow: What to do when the chunks do not fit the context window: "refine" (several
                rounds), "drop_lowest" or "error".
            text_qa_template: A template with `context_str` followed by `query_str`; None for the
                engine's own.  Text before the context is moved to the beginning of the question
                (see `prefix_mismatches`).
            chat_history: Earlier messages, oldest first.  System messages other than the engine's
                own are put at the beginning of the question; tool messages are left out.
            generate_kwargs: Arguments of generation, such as `max_new_tokens` and `temperature`.
            streaming: Whether answers are streams.
            output_cls: A pydantic class to answer with; decoding is held to its schema, which
                follows the question.  A stream is the JSON's text.
            multimodal: Not supported.
            options: `callback_manager` and `empty_response`, as for every synthesizer.

        Raises:
            InvalidInputError: If the LLM is not a `KVCacheLLM`, or an argument is not supported.
            MissingExtraError: If `output_cls` needs llguidance, which is not installed.
        """
        known = {*FURTHER, *arguments_of(KVCacheSynthesizer)}
        refuse_unknown(options, known, "argument of KVCacheSynthesizer")
        if multimodal:
            raise InvalidInputError("KVCacheSynthesizer reads text only; leave multimodal out")
        # The helpers pack texts, which is not done here; made by hand they need not load the model.
        helpers = {name: helper() for name, helper in _HELPERS.items()}
        self._kv_llm, told = kv_llm_with_class(llm)
        output_cls = output_cls or told
        super().__init__(
            llm=self._kv_llm, streaming=streaming, output_cls=output_cls, **{**helpers, **options}
        )
        self._policy, self._overflow = given_policy(policy), overflow
        self._template, self._messages = text_qa_template, tuple(chat_history)
        self._generate_kwargs, self._told = dict(generate_kwargs or {}), ""
        if output_cls is not None:
            schema = class_schema(output_cls)
            self._generate_kwargs["json_schema"] = schema
            self._told = json_instruction(schema)
        self._mismatches = Mismatches()

    @property
    def prefix_mismatches(self) -> int:
        """How many prompts had other text before the chunks than the engine does."""
        return self._mismatches.count

    def with_history(
        self, chat_history: Sequence[ChatMessage], *, streaming: bool | None = None
    ) -> Self:
        """The same synthesizer within a conversation; both count and warn together.

        Args:
            chat_history: Earlier messages, oldest first.
            streaming: Whether answers are streams; None for this one's setting.
        """
        twin = copy.copy(self)
        twin._messages = tuple(chat_history)
        twin._streaming = self._streaming if streaming is None else streaming
        return twin

    # ------------------------------------------------------------------ nodes instead of texts
    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from nodes; without nodes, with the empty response."""
        report = _report_on(nodes)
        given = {**response_kwargs, "kv_nodes": nodes, "kv_report": report}
        response = super().synthesize(query, nodes, additional_source_nodes, **given)
        return _reported(response, report)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """`synthesize` that does not block the event loop."""
        report = _report_on(nodes)
        given = {**response_kwargs, "kv_nodes": nodes, "kv_report": report}
        response = await super().asynthesize(query, nodes, additional_source_nodes, **given)
        return _reported(response, report)

    # ------------------------------------------------------------------ answers
    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        kv_nodes: Sequence[NodeWithScore] = (),
        kv_report: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Answer a question.

        Args:
            query_str: The question.
            text_chunks: LLM texts of the chunks.
            kv_nodes: Their nodes, if any.
            kv_report: Receives the metrics.
            response_kwargs: Further values of the template.
        """
        report = {} if kv_report is None else kv_report
        self._start(query_str, text_chunks)
        task = self._task(query_str, text_chunks, kv_nodes, response_kwargs)
        if self._streaming:
            found = self._kv_llm.stream_answer(task.prompt, task.request, **self._generate_kwargs)
            answered: RESPONSE_TEXT_TYPE = self._tokens(task, found, report)
        else:
            response = self._kv_llm.answer(task.prompt, task.request, **self._generate_kwargs)
            answered = self._finish(task, response, report)
        dispatcher.event(GetResponseEndEvent())
        return answered

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        kv_nodes: Sequence[NodeWithScore] = (),
        kv_report: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """`get_response` that does not block the event loop."""
        report = {} if kv_report is None else kv_report
        self._start(query_str, text_chunks)
        # The first question loads the model.
        task = await asyncio.to_thread(
            self._task, query_str, text_chunks, kv_nodes, response_kwargs
        )
        options = self._generate_kwargs
        if self._streaming:
            found = await self._kv_llm.astream_answer(task.prompt, task.request, **options)
            answered: RESPONSE_TEXT_TYPE = self._atokens(task, found, report)
        else:
            response = await self._kv_llm.aanswer(task.prompt, task.request, **options)
            answered = self._finish(task, response, report)
        dispatcher.event(GetResponseEndEvent())
        return answered

    def _start(self, query: str, texts: Sequence[str]) -> None:
        dispatcher.event(GetResponseStartEvent(query_str=query, text_chunks=list(texts)))

    def _task(
        self,
        query: str,
        texts: Sequence[str],
        nodes: Sequence[NodeWithScore],
        variables: dict[str, Any],
    ) -> Task:
        llm, template, asked = self._kv_llm, self._template, f"{query}{self._told}"
        engine, turns = llm.engine, spoken_turns(self._messages)
        wording = Wording.from_query([*turns, said("user", asked)], engine)
        if template is not None:
            found = Wording.by(template, asked, turns, llm, **variables)
            if found is None:
                text = plain_prompt(template, llm, asked, texts, **variables)
                return self._started(Task(query, text, Prompt.text(text), template))
            wording = found
        self._mismatches.note(wording.mismatches)
        step = [Source(text, place=place) for place, text in enumerate(texts)]
        for place, (one, text) in enumerate(zip(nodes, texts, strict=False)):
            warn_of_changes(one.node, text, llm.watch)
            step[place] = source_of(one.node, text, score=one.score, place=place)
        sources, scores = as_chunks([step])
        request = Prompt.over(
            wording.question,
            sources,
            [one.chunk(engine) for one in sources],
            prefix_mismatch=bool(wording.mismatches),
            policy=self._policy,
            overflow=self._overflow,
            scores=scores,
            history=wording.history,
            asked=query,
        )
        prompt = written_prompt(engine, texts, wording.written)
        return self._started(
            Task(query, prompt, request, template or PromptTemplate(own_template(engine)))
        )

    def _started(self, task: Task) -> Task:
        arguments = {"query_str": task.query}
        self._kv_llm._log_template_data(task.template, **arguments)
        dispatcher.event(LLMPredictStartEvent(template=task.template, template_args=arguments))
        return task

    # ------------------------------------------------------------------ what comes back
    def _tokens(
        self, task: Task, responses: CompletionResponseGen, report: dict[str, Any]
    ) -> Generator[str, None, None]:
        last = None
        with closing(responses):
            for response in responses:
                last = response
                if response.delta:
                    yield response.delta
        self._report(task, last, report)

    async def _atokens(
        self, task: Task, responses: CompletionResponseAsyncGen, report: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        last = None
        async with aclosing(responses):
            async for response in responses:
                last = response
                if response.delta:
                    yield response.delta
        self._report(task, last, report)

    def _finish(
        self, task: Task, response: CompletionResponse, report: dict[str, Any]
    ) -> str | BaseModel:
        dispatcher.event(LLMPredictEndEvent(output=response.text))
        self._report(task, response, report)
        if self._output_cls is None:
            return response.text
        return self._output_cls.model_validate_json(response.text)

    def _report(
        self, task: Task, response: CompletionResponse | None, report: dict[str, Any]
    ) -> None:
        if response is None or not isinstance(response.raw, dict):
            return
        report.update(response.raw["kv_cache"])
        dispatcher.event(KVCacheReuseEvent(query_str=task.query, metrics=dict(report)))

    # ------------------------------------------------------------------ prompts
    def _get_prompts(self) -> PromptDictType:
        template = self._template or PromptTemplate(own_template(self._kv_llm.engine))
        return {"text_qa_template": template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if "text_qa_template" in prompts:
            self._template = prompts["text_qa_template"]
            self._mismatches.forget()


def _report_on(nodes: Sequence[NodeWithScore]) -> dict[str, Any]:
    """Where metrics go; without nodes the model is not asked, and nothing is what it cost."""
    if nodes:
        return {}
    return {**Metrics(rounds=0).to_dict(), "answered_from_ids": [], "prompt": "plain"}


def _reported(response: RESPONSE_TYPE, report: dict[str, Any]) -> RESPONSE_TYPE:
    """Put the metrics beside the nodes' metadata; a stream fills them in when it ends."""
    response.metadata = {**(response.metadata or {}), "kv_cache": report}
    return response
