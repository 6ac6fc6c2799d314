"""One call of the chat model, ready for the engine: what is asked, over which chunks, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from langchain_core.runnables.config import ensure_config
from langchain_core.utils.function_calling import convert_to_openai_tool

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import (
    JSON_FORM,
    ConversationForms,
    given_policy,
    is_remote,
    json_instruction,
    opened,
    rendered,
)
from kvcache_rag.integration.question import (
    AskedMessages,
    SourcedQuestion,
    answer_reader,
    take_choice,
    with_form,
)
from langchain_kvcache_rag.messages import said_messages
from langchain_kvcache_rag.retrieved import documents_in
from langchain_kvcache_rag.settings import INTERNAL
from langchain_kvcache_rag.structured import schema_of_format

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from langchain_core.messages import BaseMessage
    from langchain_core.runnables import RunnableConfig

    from kvcache_rag import Answer, Engine
    from kvcache_rag.generation import AnswerStream
    from kvcache_rag.integration import AnswerReader, ConversationForm
    from kvcache_rag.integration.question import FrameworkMessage
    from langchain_kvcache_rag.settings import ChatSettings
    from langchain_kvcache_rag.shared import Shared

_FROM_MESSAGES: Final = ("chunks", "history", "prefix_mismatch", "cancelled")
_FOR_CHUNKS: Final = ("none_below", "overflow", "policy", "scores")
_WHEN_SAMPLING: Final = ("top_k", "top_p")
# LangChain's names of what transformers calls otherwise.
_RENAMED: Final = {"max_tokens": "max_new_tokens", "timeout": "max_time"}


@dataclass(frozen=True, eq=False)
class EngineCall:
    """A question for the engine.

    Attributes:
        engine: Answers.
        asked: What the messages ask.
        options: Keyword arguments of the engine's `generate` or `complete`.
        form: How it is written and how the answer is read.
        model_name: As the user or the server calls it.
    """

    engine: Engine
    asked: SourcedQuestion
    options: dict[str, Any]
    form: ConversationForm
    model_name: str

    def run(self, cancelled: threading.Event | None = None) -> Answer:
        """Answer; stops at the next token once `cancelled` is set."""
        return self.asked.answer(self.engine, {**self.options, "cancelled": cancelled})

    def open(self) -> AnswerStream:
        return self.asked.stream(self.engine, self.options)

    def reader(self) -> AnswerReader:
        """What takes the answer apart."""
        return answer_reader(self.form, lambda: _written(self.engine, self.form))


def read_call(
    llm: ChatSettings,
    messages: Sequence[BaseMessage],
    stop: Sequence[str] | str | None,
    given: Mapping[str, Any],
) -> EngineCall:
    """Read messages and settings for the engine, loading it if need be.

    Args:
        llm: Is asked.
        messages: Oldest first.
        stop: Strings before which the answer ends.
        given: Arguments of the call.

    Raises:
        InvalidInputError: If messages, arguments or tools cannot be used, or not together.
    """
    options = call_options(llm, stop, given)
    engine, shared = llm.engine, llm._shared
    forms = ConversationForms.of(engine)
    schema = options.pop("json_schema", None)
    suffix = "" if schema is None else json_instruction(schema)
    said = said_messages(messages, documents_in if llm.match_chunks else None)
    read = AskedMessages.from_messages(said, engine.template.system, suffix=suffix)
    turns = read.turns if read.is_grounded else opened(read.turns, llm.system_prompt)
    choice, values = (
        take_choice(options, described_tools),
        options.pop("chat_template_kwargs", None),
    )
    if schema is not None:
        if choice.may_call:
            raise InvalidInputError(
                "an answer cannot be held to json_schema and call tools at once; bind one of them, "
                "or give an agent response_format=ToolStrategy(...)"
            )
        options = forms.grammars.held(schema, options)
    form = forms.form(turns, choice, values, is_held=schema is not None)
    if form.is_fallback:
        shared.warn_once("tools", JSON_FORM)
    options = with_form(options, form, is_grounded=read.is_grounded)
    if read.is_grounded:
        asked = _over_documents(read, form, engine, shared)
    else:
        options = {name: one for name, one in options.items() if name not in _FOR_CHUNKS}
        asked = _without_documents(said, form, engine, shared)
    return EngineCall(engine, asked, options, form, llm.model or str(getattr(engine, "name", "")))


def _over_documents(
    read: AskedMessages, form: ConversationForm, engine: Engine, shared: Shared
) -> SourcedQuestion:
    texts = [one.text for one in read.sources]
    shared.pasted.note(texts)
    if read.prefix_mismatch:
        shared.warn_once(
            "system",
            "the system message is not the instruction that the chunks were prefilled "
            "behind, so it stands behind them, before the question; give it as "
            "ChatKVCache(system_prompt=...) to have it first",
        )
    return read.question(form, [shared.references.chunk(text, engine) for text in texts])


def _without_documents(
    said: Sequence[FrameworkMessage], form: ConversationForm, engine: Engine, shared: Shared
) -> SourcedQuestion:
    """A conversation; the first time that documents seem to stand in it as text it warns."""
    tokens = 0
    if not is_remote(engine):  # who has no tokenizer cannot tell how long they are
        brought = (one.text for one in said if one.role in ("system", "user"))
        tokens = max((shared.pasted.tokens(text, engine) for text in brought), default=0)
    if tokens:
        shared.warn_once(
            "pasted",
            f"a message of {tokens} tokens came without document blocks, so nothing of it can be "
            "reused; if documents stand in it, hand them over with KVCacheRAG, or as "
            "document_block(document) in a message's content",
        )
    return SourcedQuestion.text(_written(engine, form), "pasted" if tokens else "plain")


def _written(engine: Engine, form: ConversationForm) -> str:
    """The conversation as one text; over documents, as if there were none."""
    return rendered(engine.render_chat, form.turns, **form.chat)


def call_options(
    llm: ChatSettings, stop: Sequence[str] | str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of the model and arguments of a call, under the engine's names; the call wins.

    Raises:
        InvalidInputError: If an argument says what the messages say.
    """
    settings = {
        "temperature": llm.temperature,
        "max_tokens": llm.max_tokens,
        "timeout": llm.timeout,
        "top_p": llm.top_p,
        "top_k": llm.top_k,
        "stop": llm.stop,
        "policy": llm.policy,
        "overflow": llm.overflow,
        "chat_template_kwargs": llm.chat_template_kwargs or None,
    }
    options: dict[str, Any] = {}
    for one in (settings, llm.generate_kwargs, given, {"stop": stop}):
        for name, value in one.items():
            if name in _FROM_MESSAGES:
                raise InvalidInputError(f"{name} comes from the messages; leave it out")
            if value is not None and name == "response_format":
                options["json_schema"] = schema_of_format(value)
            elif value is not None and name not in INTERNAL:
                options[_RENAMED.get(name, name)] = value
    sampling = options.get("do_sample", bool(options.get("temperature")))
    if not sampling and "generation_config" not in options:
        # Greedy search does not read them, and transformers says so each time.
        for name in _WHEN_SAMPLING:
            options.pop(name, None)
    return options


def described_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools as chat templates read them.

    Raises:
        InvalidInputError: If something is no tool.
    """
    try:
        described = [convert_to_openai_tool(tool) for tool in tools]
    except (TypeError, ValueError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInputError(f"a tool cannot be described: {reason}") from error
    for tool in described:
        function = tool.get("function")
        if not isinstance(function, dict) or "name" not in function:
            raise InvalidInputError(
                f"the tool {tool} is no function, and tools that a provider runs are not here; "
                "give a function, a tool, a class or a description of a function"
            )
    return described


def with_policy(config: RunnableConfig | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a call, with the policy that its config, or that of the chain around it, says.

    LangChain hands the keywords of a chain's call to the first step alone, its config to all.

    Args:
        config: `config["configurable"]["policy"]` is a policy or the name of one.
        given: The keywords; a policy among them, or the name of one, wins.

    Raises:
        InvalidInputError: If the policy is none.
    """
    policy = given.get("policy")
    if policy is None:
        policy = ensure_config(config)["configurable"].get("policy")
    if policy is None:
        return dict(given)
    return {**given, "policy": given_policy(policy)}
