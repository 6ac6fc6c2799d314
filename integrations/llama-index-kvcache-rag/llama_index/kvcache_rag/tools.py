"""Tools and thoughts in LlamaIndex's messages; nodes in a tool's result are chunks.

An agent hands the LLM the text that a retriever's tool made of its nodes.  Their texts are found
again (`matching`), stand before the conversation as chunks, and the tool's message refers to them.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import ToolSelection

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import (
    JSON_FORM,
    ConversationForms,
    Reasoning,
    ToolCall,
    UnreadableCall,
    rendered,
)
from kvcache_rag.integration.question import (
    AskedMessages,
    FrameworkMessage,
    MessagePart,
    answer_reader,
    take_choice,
    with_form,
)
from llama_index.kvcache_rag.matching import found_in, in_prompt, source_of
from llama_index.kvcache_rag.options import turn
from llama_index.kvcache_rag.responses import Prompt

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence

    from llama_index.core.base.llms.types import CompletionResponse

    from kvcache_rag.integration import AnswerPart, AnswerReader, ConversationForm, Turn
    from kvcache_rag.integration.question import Source
    from llama_index.kvcache_rag.settings import LLMSettings

_OF_TOOLS: Final = (MessageRole.TOOL, MessageRole.FUNCTION)
_HOLDING: Final = ("logits_processor", "json_schema")
"""Arguments that decide how an answer is written, so that it can be no call of a tool."""


@dataclass(frozen=True)
class Spoken:
    """Messages, ready for the engine.

    Attributes:
        prompt: A text, or a question over chunks.
        options: Of the call, and what the form adds.
        form: How the answer is read.
        written: Writes the prompt, or what it would be without chunks.
    """

    prompt: Prompt
    options: dict[str, Any]
    form: ConversationForm
    written: Callable[[], str]

    def reader(self) -> AnswerReader:
        """What takes the answer apart."""
        return answer_reader(self.form, self.written)


def spoken(
    llm: LLMSettings,
    messages: Sequence[ChatMessage],
    options: Mapping[str, Any],
    plain: Callable[[Mapping[str, Any]], Prompt],
    nodes: Mapping[str, Source],
) -> Spoken:
    """Read messages with calls of tools, and the tools of a call, for the engine.

    Args:
        llm: Is asked.
        messages: Oldest first.
        options: Arguments of the call; those about tools and the chat template are taken out.
        plain: Reads messages without calls, given arguments of `Engine.render_chat`.
        nodes: That were retrieved last, by their texts.

    Raises:
        InvalidInputError: If tools cannot be used.
    """
    given = dict(options)
    choice = take_choice(given)
    values = given.pop("chat_template_kwargs", None) or llm.chat_template_kwargs
    engine, forms = llm.engine, ConversationForms.of(llm.engine)
    is_held = any({**llm.generate_kwargs, **given}.get(name) for name in _HOLDING)
    has_tools = choice.may_call or any(map(_is_of_tools, messages))
    if has_tools and llm.has_own_form:
        raise InvalidInputError(
            "tools are written by the tokenizer's chat template; leave messages_to_prompt out"
        )
    read = AskedMessages(())
    if has_tools:
        said = [_said(message, llm, nodes) for message in messages]
        read = AskedMessages.from_messages(said, engine.prefix_text, engine.template.system)
        read = replace(read, sources=in_prompt(read.sources))
    form = forms.form(read.turns, choice, values, is_held=is_held)
    if form.is_fallback:
        llm.warn_once(JSON_FORM)

    def written() -> str:
        if not has_tools:
            return llm.chat_prompt(messages)
        return rendered(engine.render_chat, form.turns, **form.chat)

    if not has_tools:
        prompt = plain(form.chat)
    elif read.is_grounded:
        chunks = [one.chunk(engine) for one in read.sources]
        prompt = read.question(form, chunks, overflow="drop_lowest")
    else:
        prompt = Prompt.text(written())
    asked = prompt.question
    added = with_form(given, form, is_grounded=not asked.is_completion)
    return Spoken(prompt, added, form, (lambda: asked.text) if asked.is_completion else written)


def _is_of_tools(message: ChatMessage) -> bool:
    return message.role in _OF_TOOLS or bool(_calls(message))


def _calls(message: ChatMessage) -> list[Turn]:
    return [
        {
            "type": "function",
            "id": block.tool_call_id or "",
            "function": {"name": block.tool_name, "arguments": block.tool_kwargs},
        }
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]


def _said(message: ChatMessage, llm: LLMSettings, nodes: Mapping[str, Source]) -> FrameworkMessage:
    one = turn(message)
    role, text = one["role"], one["content"]
    if message.role in _OF_TOOLS:
        found = found_in(text, llm)
        within = tuple((each.start, each.end, source_of(each, nodes)) for each in found)
        named = {name: message.additional_kwargs.get(name) for name in ("name", "tool_call_id")}
        more = {name: value for name, value in named.items() if value is not None}
        return FrameworkMessage("tool", (MessagePart(text, within=within),), more)
    calls = _calls(message)
    return FrameworkMessage(role, (MessagePart(text),), {"tool_calls": calls} if calls else {})


class Speaking:
    """An answer in LlamaIndex's blocks, as far as it is written."""

    def __init__(self, asked: Spoken) -> None:
        """Read the answer to `asked` from its beginning."""
        self._reader = asked.reader()
        self._form = asked.form.tool_form
        self._text, self._thought = "", ""
        self._calls: list[ToolCallBlock] = []

    def whole(self, completion: CompletionResponse) -> ChatResponse:
        """The response of a whole answer."""
        self._take([*self._reader.feed(completion.text), *self._reader.finish()])
        return self._response(completion, None, "")

    def piece(self, completion: CompletionResponse) -> ChatResponse | None:
        """The response after one more piece; None while it is not known what the piece is."""
        parts = self._reader.feed(completion.delta or "")
        is_last = completion.raw is not None
        if is_last:
            parts += self._reader.finish()
        said, thought = self._take(parts)
        return self._response(completion, said, thought) if parts or is_last else None

    def _take(self, parts: Sequence[AnswerPart]) -> tuple[str, str]:
        """Add parts to the answer; gives what of them is text and what thought."""
        said, thought = "", ""
        for part in parts:
            if isinstance(part, ToolCall):
                self._calls.append(
                    ToolCallBlock(
                        tool_call_id=part.id, tool_name=part.name, tool_kwargs=part.arguments
                    )
                )
            elif isinstance(part, Reasoning):
                thought += part.text
            else:  # LlamaIndex knows no calls that cannot be read
                said += part.text if isinstance(part, UnreadableCall) else part
        self._text += said
        self._thought += thought
        return said, thought

    def _response(
        self, completion: CompletionResponse, said: str | None, thought: str
    ) -> ChatResponse:
        blocks: list[Any] = [ThinkingBlock(content=self._thought)] if self._thought else []
        if self._text or not self._calls:
            blocks.append(TextBlock(text=self._text))
        raw = completion.raw
        if isinstance(raw, dict) and self._form:
            raw = {**raw, "tool_form": self._form}
        return ChatResponse(
            message=ChatMessage(
                role=MessageRole.ASSISTANT,
                blocks=[*blocks, *self._calls],
                additional_kwargs=dict(completion.additional_kwargs),
            ),
            delta=said,
            raw=raw,
            # Where LlamaIndex's agents look for it.
            additional_kwargs={"thinking_delta": thought} if thought else {},
        )


def chat_responses(
    completions: Generator[CompletionResponse, None, None], asked: Spoken
) -> Generator[ChatResponse, None, None]:
    """A stream of completions as one of chat responses."""
    speaking = Speaking(asked)
    with closing(completions):
        for completion in completions:
            response = speaking.piece(completion)
            if response is not None:
                yield response


async def achat_responses(
    completions: AsyncGenerator[CompletionResponse, None], asked: Spoken
) -> AsyncGenerator[ChatResponse, None]:
    """`chat_responses` that does not block the event loop."""
    speaking = Speaking(asked)
    async for completion in completions:
        response = speaking.piece(completion)
        if response is not None:
            yield response


def selections(response: ChatResponse, is_needed: bool) -> list[ToolSelection]:
    """The calls in a response, as LlamaIndex runs them.

    Raises:
        InvalidInputError: If there is none and one is needed.
    """
    calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    if is_needed and not calls:
        is_cut = isinstance(response.raw, dict) and response.raw.get("finish_reason") == "length"
        raise InvalidInputError(
            "the answer was cut before it called a tool; raise max_new_tokens"
            if is_cut
            else "the answer calls no tool; ask with tool_required=True, or take answers without "
            "calls"
        )
    return [
        ToolSelection(
            tool_id=call.tool_call_id or "",
            tool_name=call.tool_name,
            tool_kwargs=call.tool_kwargs if isinstance(call.tool_kwargs, dict) else {},
        )
        for call in calls
    ]
