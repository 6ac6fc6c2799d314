"""One call of the chat model, ready for the engine: what is asked, over which chunks, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from langchain_core.runnables.config import ensure_config
from langchain_core.utils.function_calling import convert_to_openai_tool

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import ConversationForms, ToolChoice, given_policy, rendered
from langchain_kvcache_rag.messages import Asked, Conversation, Grounded
from langchain_kvcache_rag.structured import schema_of_format

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from langchain_core.runnables import RunnableConfig

    from kvcache_rag import Answer, Engine
    from kvcache_rag.generation import AnswerStream, StoredChunk
    from kvcache_rag.integration import AnswerReader, ConversationForm, References
    from langchain_kvcache_rag.chat_model import ChatKVCache
    from langchain_kvcache_rag.messages import GivenDocument

_FROM_MESSAGES: Final = ("chunks", "history", "prefix_mismatch", "cancelled")
_FOR_CHUNKS: Final = ("none_below", "overflow", "policy", "scores")
_OF_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls")
_WHEN_SAMPLING: Final = ("top_k", "top_p")
# LangChain's names of what transformers calls otherwise.
_RENAMED: Final = {"max_tokens": "max_new_tokens", "timeout": "max_time"}
INTERNAL: Final = ("ls_structured_output_format", "stream", "structured_output_format")
"""What LangChain says to itself in the arguments of a call."""


@dataclass(frozen=True, eq=False)
class Call:
    """A question for the engine.

    Attributes:
        engine: Answers.
        references: Where the texts' KV is, as far as it was noted.
        asked: What the messages ask.
        options: Keyword arguments of the engine's `generate` or `complete`.
        form: How it is written and how the answer is read.
        model_name: As the user or the server calls it.
        is_pasted: Whether documents seem to stand in its messages as mere text.
    """

    engine: Engine
    references: References
    asked: Asked
    options: dict[str, Any]
    form: ConversationForm
    model_name: str
    is_pasted: bool = False

    @property
    def prompt_kind(self) -> str:
        """What became of the caller's messages, as `kv_cache["prompt"]` says it."""
        if isinstance(self.asked, Grounded):
            if not self.asked.texts:
                return "plain"
            return "rearranged" if self.asked.prefix_mismatch else "reused"
        return "pasted" if self.is_pasted else "plain"

    @property
    def documents(self) -> tuple[GivenDocument, ...]:
        """Whose texts its chunks are."""
        return self.asked.documents if isinstance(self.asked, Grounded) else ()

    @property
    def question(self) -> tuple[str, list[dict[str, Any]]]:
        """What is asked over documents, and the turns before it."""
        question, turns = self.form.asked
        return question, [*turns]

    def run(self, cancelled: threading.Event | None = None) -> Answer:
        """Answer; stops at the next token once `cancelled` is set."""
        asked = self.asked
        if isinstance(asked, Conversation):
            return self.engine.complete(self.prompt(), cancelled=cancelled, **self.options)
        question, history = self.question
        return self.engine.generate(
            question,
            self.chunks(asked),
            history=history,
            prefix_mismatch=asked.prefix_mismatch,
            cancelled=cancelled,
            **{**self.options, "scores": self.scores(asked), "asked": asked.asked},
        )

    def open(self) -> AnswerStream:
        asked = self.asked
        if isinstance(asked, Conversation):
            return self.engine.stream_complete(self.prompt(), **self.options)
        question, history = self.question
        return self.engine.stream(
            question,
            self.chunks(asked),
            history=history,
            prefix_mismatch=asked.prefix_mismatch,
            **{**self.options, "scores": self.scores(asked), "asked": asked.asked},
        )

    def reader(self) -> AnswerReader | None:
        """What takes the answer apart; None where it is its text."""
        return self.form.reader(self.prompt)

    def chunks(self, asked: Grounded) -> list[StoredChunk | str]:
        """The documents, each by reference if one is known that still holds, else by its text."""
        return [self.references.chunk(text, self.engine) for text in asked.texts]

    def scores(self, asked: Grounded) -> Sequence[float] | None:
        """Of the documents: those of the call, or what the messages say."""
        found: Sequence[float] | None = self.options.get("scores")
        return asked.scores if found is None else found

    def prompt(self) -> str:
        """The conversation as one text; over documents, as if there were none."""
        return rendered(self.engine.render_chat, self.form.turns, **self.form.chat)


def call_of(
    engine: Engine,
    references: References,
    asked: Asked,
    options: dict[str, Any],
    *,
    model_name: str,
    is_held: bool,
    is_pasted: bool,
) -> Call:
    """A call, with tools and other values of the chat template taken out of its options.

    Args:
        engine: Answers.
        references: Where the texts' KV is.
        asked: What the messages ask.
        options: As `call_options` gave them.
        model_name: As the user calls it; "" for the server's name.
        is_held: Whether a grammar holds the answer already.
        is_pasted: As of `Call`.

    Raises:
        InvalidInputError: If tools cannot be used, or not beside that grammar.
    """
    given = [options.pop(name, None) for name in _OF_TOOLS]
    values = options.pop("chat_template_kwargs", None)
    tools = described_tools(given[0] or ())
    choice = ToolChoice.of(tools, *(given[1:] if tools else (None, None)))
    if is_held and choice.may_call:
        raise InvalidInputError(
            "an answer cannot be held to json_schema and call tools at once; bind one of them, or "
            "give an agent response_format=ToolStrategy(...)"
        )
    turns = asked.turns if isinstance(asked, Conversation) else asked.all_turns
    form = ConversationForms.of(engine).form(turns, choice, values, is_held=is_held)
    processors = [*(options.get("logits_processor") or ())]
    options.update(form.options)
    if processors:
        options["logits_processor"] = [*processors, *form.options.get("logits_processor", ())]
    if isinstance(asked, Grounded):
        options.update(form.chat)
    name = model_name or str(getattr(engine, "name", ""))
    return Call(engine, references, asked, options, form, name, is_pasted)


def call_options(
    llm: ChatKVCache, stop: Sequence[str] | str | None, given: Mapping[str, Any]
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


def for_asked(asked: Asked, options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that mean nothing to this question."""
    if isinstance(asked, Grounded):
        return options
    return {name: value for name, value in options.items() if name not in _FOR_CHUNKS}
