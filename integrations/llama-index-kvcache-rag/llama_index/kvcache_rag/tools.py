"""Tools and thoughts in LlamaIndex's messages; nodes in what a tool said are chunks.

An agent hands the LLM the text that a retriever's tool made of its nodes.  Their texts are found
again (`matching`), stand before the conversation as chunks, and the tool's message refers to them.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
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
    ToolChoice,
    UnreadableCall,
    instructed,
    joined,
    reference_to,
    scores_by_step,
)
from llama_index.kvcache_rag.matching import chunk_of, found_in, ids_of
from llama_index.kvcache_rag.options import turn
from llama_index.kvcache_rag.responses import Grounded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence

    from llama_index.core.base.llms.types import CompletionResponse

    from kvcache_rag.integration import (
        AnswerPart,
        AnswerReader,
        ConversationForm,
        FoundText,
        Turn,
    )
    from llama_index.kvcache_rag.llm import KVCacheLLM
    from llama_index.kvcache_rag.matching import KnownNode
    from llama_index.kvcache_rag.responses import Prompt

_HOLDING: Final = ("logits_processor", "json_schema")
"""Arguments that decide how an answer is written, so that it can be no call of a tool."""


@dataclass(frozen=True)
class Spoken:
    """Messages, ready for the engine.

    Attributes:
        prompt: A text, or a question over chunks.
        options: For the engine, beside those of the call.
        form: How the answer is read.
        written: Writes the prompt, or what it would be without chunks.
    """

    prompt: Prompt
    options: dict[str, Any]
    form: ConversationForm
    written: Callable[[], str]

    def reader(self) -> AnswerReader | None:
        """What takes the answer apart; None where it is its text."""
        return self.form.reader(self.written)


def spoken(
    llm: KVCacheLLM,
    messages: Sequence[ChatMessage],
    given: dict[str, Any],
    plain: Callable[[Mapping[str, Any]], Prompt],
    nodes: Mapping[str, KnownNode],
) -> Spoken:
    """Read messages with calls of tools, and the tools of a call, for the engine.

    Args:
        llm: Is asked.
        messages: Oldest first.
        given: Arguments of the call; those about tools and the chat template are taken out.
        plain: Reads messages without calls, given arguments of `Engine.render_chat`.
        nodes: That were retrieved last, by their texts.

    Raises:
        InvalidInputError: If tools cannot be used.
    """
    tools, chosen, parallel = (
        given.pop(name, None) for name in ("tools", "tool_choice", "parallel_tool_calls")
    )
    values = given.pop("chat_template_kwargs", None) or llm.chat_template_kwargs
    choice = ToolChoice.of(tools, chosen if tools else None, parallel)
    forms = ConversationForms.of(llm.engine)
    is_held = any({**llm.generate_kwargs, **given}.get(name) for name in _HOLDING)
    if not choice.may_call and not any(map(_is_of_tools, messages)):
        form = forms.form((), choice, values, is_held=is_held)
        prompt = plain(form.chat)
        written = prompt if isinstance(prompt, str) else lambda: llm.chat_prompt(messages)
        more = form.chat if isinstance(prompt, Grounded) else {}
        return Spoken(prompt, {**form.options, **more}, form, _writer(written))
    if llm.has_own_form:
        raise InvalidInputError(
            "tools are written by the tokenizer's chat template; leave messages_to_prompt out"
        )
    conversation = _Conversation.of(llm, messages, nodes)
    form = forms.form(conversation.turns, choice, values, is_held=is_held)
    if form.is_fallback:
        llm.warn_once(JSON_FORM)
    render = llm.engine.render_chat
    if not conversation.found:
        text = render(form.turns, **form.chat)
        return Spoken(text, form.options, form, lambda: text)
    question, history = form.asked
    known = scores_by_step(conversation.steps)
    grounded = Grounded(
        question,
        tuple(chunk_of(one, llm.engine) for one in conversation.found),
        overflow="drop_lowest",
        prefix_mismatch=conversation.prefix_mismatch,
        scores=None if known is None else tuple(known[one.text] for one in conversation.found),
        history=history,
        nodes=ids_of(conversation.found, nodes),
        asked=conversation.asked,
    )
    options = {**form.options, **form.chat}
    return Spoken(grounded, options, form, lambda: render(form.turns, **form.chat))


def _writer(written: str | Callable[[], str]) -> Callable[[], str]:
    return (lambda: written) if isinstance(written, str) else written


def _is_of_tools(message: ChatMessage) -> bool:
    return message.role in (MessageRole.TOOL, MessageRole.FUNCTION) or bool(_calls(message))


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


@dataclass
class _Conversation:
    """Turns, and the chunks that what tools said refers to."""

    nodes: Mapping[str, KnownNode]
    turns: list[Turn] = field(default_factory=list)
    found: list[FoundText] = field(default_factory=list)
    steps: list[list[tuple[str, float | None]]] = field(default_factory=list)
    prefix_mismatch: bool = False
    asked: str = ""

    @classmethod
    def of(
        cls, llm: KVCacheLLM, messages: Sequence[ChatMessage], nodes: Mapping[str, KnownNode]
    ) -> _Conversation:
        read = cls(nodes)
        for message in messages:
            read.add(message, llm)
        if read.found:
            own = (llm.engine.prefix_text, llm.engine.template.system)
            read.turns, read.prefix_mismatch = instructed(read.turns, *own)
        else:
            read.turns = joined(read.turns)
        return read

    def add(self, message: ChatMessage, llm: KVCacheLLM) -> None:
        """Read one more message."""
        one: Turn = dict(turn(message))
        if message.role in (MessageRole.TOOL, MessageRole.FUNCTION):
            one["role"] = "tool"
            found = found_in(one["content"], llm)
            known = [(each.text, self.nodes.get(each.text)) for each in found]
            self.steps.append([(text, one and one.score) for text, one in known])
            one["content"] = self._referring(one["content"], found)
            named = ("name", "tool_call_id")
            one |= {name: message.additional_kwargs.get(name) for name in named}
        elif calls := _calls(message):
            one["tool_calls"] = calls
        elif one["role"] == "user":
            self.asked = one["content"]
        self.turns.append({name: value for name, value in one.items() if value is not None})

    def _referring(self, content: str, found: Sequence[FoundText]) -> str:
        parts, at = [], 0
        for one in found:
            texts = [known.text for known in self.found]
            if one.text not in texts:
                self.found.append(one)
                texts.append(one.text)
            number = texts.index(one.text) + 1
            parts += [content[at : one.start], reference_to(one.text, number)]
            at = one.end
        return "".join([*parts, content[at:]])


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
        self._take([*self._parts(completion.text), *self._rest()])
        return self._response(completion, None, "")

    def piece(self, completion: CompletionResponse) -> ChatResponse | None:
        """The response after one more piece; None while it is not known what the piece is."""
        parts = self._parts(completion.delta or "")
        is_last = completion.raw is not None
        if is_last:
            parts += self._rest()
        said, thought = self._take(parts)
        return self._response(completion, said, thought) if parts or is_last else None

    def _parts(self, text: str) -> list[AnswerPart]:
        if self._reader is not None:
            return self._reader.feed(text)
        return [text] if text else []

    def _rest(self) -> list[AnswerPart]:
        return [] if self._reader is None else self._reader.finish()

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
