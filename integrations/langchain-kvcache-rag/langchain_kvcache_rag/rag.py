"""The step of a chain that answers a question from retrieved documents.

A stock chain pastes documents into a prompt and so loses where one ends.  `KVCacheRAG` passes them
to the chat model as content blocks, one chunk each; the chat model does the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Final

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, convert_to_messages
from langchain_core.prompts import StringPromptTemplate  # noqa: TC002  # pydantic reads it
from langchain_core.runnables import (
    AddableDict,
    Runnable,
    RunnableConfig,
    RunnableSerializable,
)
from pydantic import ConfigDict, PrivateAttr
from typing_extensions import NotRequired, TypedDict

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import MetadataWatch, refuse_unknown
from langchain_kvcache_rag.blocks import checked_prompt, document_block, warn_of_changes
from langchain_kvcache_rag.first_step import FirstStep
from langchain_kvcache_rag.settings import ChatSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence


_ELSEWHERE: Final = {name: f"ChatKVCache({name}=...)" for name in ChatSettings.model_fields}


class RagInput(TypedDict):
    """Input of `KVCacheRAG`.

    Attributes:
        question: The question.  Without it `input` is read, the name in LangChain's retrieval
            chain.
        context: The retrieved documents, best first.
        chat_history: Earlier turns, oldest first; they come after the documents.
    """

    question: str
    context: list[Document]
    chat_history: NotRequired[list[Any]]


class KVCacheRAG(RunnableSerializable[RagInput, AIMessage]):
    """Answers `{"question", "context"[, "chat_history"]}` from the KV of the documents.

        chain = (
            {"context": store.as_retriever(), "question": RunnablePassthrough()}
            | KVCacheRAG(llm=llm)
            | StrOutputParser()
        )
        chain = create_retrieval_chain(store.as_retriever(), KVCacheRAG(llm=llm))

    It returns the chat model's message, or streams its pieces.  `response_metadata` and
    `usage_metadata` say what was reused; `response_metadata["kv_cache"]["answered_from"]` has the
    places in `context` of the documents used.  Keywords of a call (`stop`, `policy`, `max_tokens`,
    ...) go to the chat model; `batch` answers in padded `generate()` calls.

    Attributes:
        llm: A `ChatKVCache`, or one with bound arguments.
        document_prompt: A PromptTemplate over `page_content` and metadata names that writes what
            the model reads of a document, which is its chunk; None for the text alone.  A store
            that prefills needs the same one (`KVCacheChroma(document_prompt=...)`).
    """

    llm: Runnable[Any, AIMessage]
    document_prompt: StringPromptTemplate | None = None
    _watch: MetadataWatch = PrivateAttr(default_factory=MetadataWatch)

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def __init__(self, llm: Runnable[Any, AIMessage], **fields: Any) -> None:
        """Answer with `llm`; `fields` are those of every Runnable, such as `name`.

        Raises:
            InvalidInputError: If `llm` is not a Runnable, `document_prompt` not a PromptTemplate,
                or an argument is unknown.
        """
        if not isinstance(llm, Runnable):
            raise InvalidInputError(
                f"KVCacheRAG needs a chat model such as ChatKVCache, not a {type(llm).__name__}"
            )
        refuse_unknown(fields, type(self).model_fields, "argument of KVCacheRAG", _ELSEWHERE)
        if fields.get("document_prompt") is not None:
            checked_prompt(fields["document_prompt"])
        super().__init__(**{"llm": llm, **fields})

    @property
    def InputType(self) -> Any:
        return RagInput

    @property
    def OutputType(self) -> Any:
        return BaseMessage

    def __ror__(self, other: Any) -> RunnableSerializable[Any, AIMessage]:
        first: Any = FirstStep(other) if isinstance(other, Mapping) else other
        return super().__ror__(first)

    def invoke(
        self, input: RagInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answer one question.

        Raises:
            InvalidInputError: If the question is missing, or the context is not a list of
                documents.
        """
        return self._call_with_config(self._answer, input, config, **kwargs)

    async def ainvoke(
        self, input: RagInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """`invoke` that does not block the event loop."""
        return await self._acall_with_config(self._aanswer, input, config, **kwargs)

    def stream(
        self, input: RagInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessage]:
        """Answer one question piece by piece; closing the iterator frees the model at once."""
        return self.transform(iter([input]), config, **kwargs)

    def astream(
        self, input: RagInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessage]:
        """`stream` that does not block the event loop."""

        async def given() -> AsyncIterator[RagInput]:
            yield input

        return self.atransform(given(), config, **kwargs)

    def transform(
        self, input: Iterator[RagInput], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessage]:
        """`stream` for an input that comes in pieces."""
        return self._transform_stream_with_config(input, self._pieces, config, **kwargs)

    def atransform(
        self, input: AsyncIterator[RagInput], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessage]:
        """`transform` that does not block the event loop."""
        return self._atransform_stream_with_config(input, self._apieces, config, **kwargs)

    def batch(
        self,
        inputs: list[RagInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Answer several questions in padded batches; `max_concurrency` limits their rows."""
        return self._batch_with_config(
            self._answers, inputs, config, return_exceptions=return_exceptions, **kwargs
        )

    async def abatch(
        self,
        inputs: list[RagInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """`batch` that does not block the event loop."""
        return await self._abatch_with_config(
            self._aanswers, inputs, config, return_exceptions=return_exceptions, **kwargs
        )

    def _messages(self, given: Mapping[str, Any]) -> list[BaseMessage]:
        messages = messages_of(given, self.document_prompt)
        _warn_of_history(given)
        if self.document_prompt is not None:
            for document in given["context"]:
                warn_of_changes(document, self.document_prompt, self._watch)
        return messages

    # What LangChain calls with a run manager takes one; the config has its child callbacks already.
    def _answer(
        self, input: RagInput, run_manager: object, config: RunnableConfig, **kwargs: Any
    ) -> AIMessage:
        return self.llm.invoke(self._messages(input), config, **kwargs)

    async def _aanswer(
        self, input: RagInput, run_manager: object, config: RunnableConfig, **kwargs: Any
    ) -> AIMessage:
        return await self.llm.ainvoke(self._messages(input), config, **kwargs)

    def _pieces(
        self, input: Iterator[RagInput], run_manager: object, config: RunnableConfig, **kwargs: Any
    ) -> Iterator[AIMessage]:
        whole = AddableDict()
        for piece in input:
            whole = whole + AddableDict(_checked(piece))
        with closing(self.llm.stream(self._messages(whole), config, **kwargs)) as pieces:  # type: ignore[type-var]  # a generator, though it is declared as an iterator
            yield from pieces

    async def _apieces(
        self,
        input: AsyncIterator[RagInput],
        run_manager: object,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessage]:
        whole = AddableDict()
        async for piece in input:
            whole = whole + AddableDict(_checked(piece))
        async with aclosing(self.llm.astream(self._messages(whole), config, **kwargs)) as pieces:  # type: ignore[type-var]  # as above
            async for message in pieces:
                yield message

    def _answers(
        self,
        inputs: list[RagInput],
        run_manager: object,
        config: list[RunnableConfig],
        **kwargs: Any,
    ) -> list[Any]:
        asked = _Asked(inputs, config, self._messages)
        return asked.results(
            self.llm.batch(asked.messages, asked.configs, return_exceptions=True, **kwargs)
        )

    async def _aanswers(
        self,
        inputs: list[RagInput],
        run_manager: object,
        config: list[RunnableConfig],
        **kwargs: Any,
    ) -> list[Any]:
        asked = _Asked(inputs, config, self._messages)
        return asked.results(
            await self.llm.abatch(asked.messages, asked.configs, return_exceptions=True, **kwargs)
        )


class _Asked:
    """The questions of a batch that can be asked; the others have their error already."""

    def __init__(
        self,
        inputs: Sequence[RagInput],
        configs: Sequence[RunnableConfig],
        read: Callable[[RagInput], list[BaseMessage]],
    ) -> None:
        self.messages: list[list[BaseMessage]] = []
        self.configs: list[RunnableConfig] = []
        self._errors: list[InvalidInputError | None] = []
        for given, config in zip(inputs, configs, strict=True):
            try:
                self.messages.append(read(given))
            except InvalidInputError as error:
                self._errors.append(error)
                continue
            self._errors.append(None)
            self.configs.append(config)

    def results(self, answered: Sequence[Any]) -> list[Any]:
        """Answers and errors in the order of the inputs."""
        answers = iter(answered)
        return [next(answers) if error is None else error for error in self._errors]


def messages_of(
    given: Mapping[str, Any], document_prompt: StringPromptTemplate | None = None
) -> list[BaseMessage]:
    """The messages for a question: history, then documents and question in one user message.

    Args:
        given: A `RagInput`.
        document_prompt: See `KVCacheRAG`.

    Raises:
        InvalidInputError: If a part is missing or of another type, or the prompt names metadata
            that a document does not have.
    """
    given = _checked(given)
    question, context = given.get("question", given.get("input")), given.get("context")
    if not isinstance(question, str) or not question.strip():
        raise InvalidInputError(
            'KVCacheRAG needs a "question" (or "input"), a text that is not empty'
        )
    if not isinstance(context, (list, tuple)) or not all(
        isinstance(one, Document) for one in context
    ):
        raise InvalidInputError(
            'KVCacheRAG needs a "context", a list of Documents; give it a retriever\'s output as '
            "it is, not joined to a text"
        )
    history = given.get("chat_history") or []
    try:
        if not isinstance(history, (list, tuple)):
            raise TypeError(f"it is a {type(history).__name__}")
        turns = convert_to_messages(history)
    except (NotImplementedError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInputError(f'"chat_history" must be a list of messages: {reason}') from error
    # With nothing retrieved it is still a question over documents, under the same instruction.
    blocks: list[Any] = [document_block(document, document_prompt) for document in context]
    blocks = blocks or [document_block(Document(""))]
    return [*turns, HumanMessage(content=[*blocks, {"type": "text", "text": question}])]


def _warn_of_history(given: Mapping[str, Any]) -> None:
    """Warn of earlier turns under another name than is read; other keys are the chain's own."""
    named = [name for name in given if "history" in str(name) and name != "chat_history"]
    turns = [name for name in named if given[name] and isinstance(given[name], (list, tuple))]
    if turns and "chat_history" not in given:
        warnings.warn(
            f'KVCacheRAG does not read {turns[0]!r}; give earlier turns as "chat_history"',
            stacklevel=2,
        )


def _checked(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidInputError(
            'KVCacheRAG answers {"question": ..., "context": [...]}, not a '
            f"{type(given).__name__}"
        )
    return given
