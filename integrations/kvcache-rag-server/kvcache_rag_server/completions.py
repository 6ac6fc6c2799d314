"""OpenAI's `POST /v1/chat/completions` and `POST /v1/completions`, with `documents`."""

# FastAPI reads the annotations of routes when they are made, so they are not postponed.

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from kvcache_rag.generation.request import DEFAULT_NEW_TOKENS
from kvcache_rag.metrics import Answer
from kvcache_rag.prompt.conversation import joined, opened, said
from kvcache_rag.prompt.template import Message
from kvcache_rag_server.backend import BackendRequest, Started
from kvcache_rag_server.bodies import CheckedRoute
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.lifecycle import AppContext, respond
from kvcache_rag_server.requests import ChatRequest, CompletionRequest, numbers, work_of
from kvcache_rag_server.responses import (
    ANSWERING,
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionForm,
    Usage,
    error_responses,
    plain,
    reason_of,
)

STREAM: Final = {
    "text/event-stream": {
        "schema": {"type": "string"},
        "example": 'data: {"object":"chat.completion.chunk", …}\n\ndata: [DONE]\n\n',
    }
}
"""How a streamed answer is declared."""

DEFAULT_TOKENS: Final = 16
"""Of a completion that says nothing else, as at OpenAI."""


class ChatForm(CompletionForm):
    """Writes answers as OpenAI's chat objects."""

    chunk_object = "chat.completion.chunk"

    def whole(self, started: Started, answer: Answer) -> dict[str, Any]:
        message = AssistantMessage(content=answer.text)
        return plain(
            ChatCompletion(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=[ChatChoice(message=message, finish_reason=reason_of(answer))],
                usage=Usage.of(answer.metrics),
                kvcache=self.report(started, answer),
            )
        )

    def opening(self) -> list[dict[str, Any]]:
        """The chunk that says who speaks."""
        return [self.chunk({"delta": {"role": "assistant", "content": ""}})]

    def said(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


def chat_router(context: AppContext) -> APIRouter:
    """The route.

    Args:
        context: The server's.
    """
    routes = APIRouter(tags=["OpenAI"], route_class=CheckedRoute)

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={200: {"content": STREAM}, **error_responses(*ANSWERING)},
        summary="Answer a conversation, over documents if there are any",
        operation_id="chat",
    )
    async def chat(
        request: Request,
        body: ChatRequest,
        caller: Annotated[Caller, Depends(context.authenticate)],
    ) -> Response:
        """The last message is the user's question.

        Documents stand before the conversation, each as one chunk; without any it is an ordinary
        conversation.  With `"stream": true` the answer is a stream of server-sent events.
        """
        work = chat_work(context, caller, body)
        places = numbers(body.documents or ())
        form = ChatForm(work.id, context.settings.name, body.includes_usage, places)
        return await respond(context, request, caller, work, form, route="chat")

    return routes


def chat_work(context: AppContext, caller: Caller, body: ChatRequest) -> BackendRequest:
    """What a chat asks.

    Raises:
        ApiError: If the last message is not the user's, or another value cannot be used.
    """
    default = min(DEFAULT_NEW_TOKENS, context.settings.max_answer_tokens)
    tokens = body.max_completion_tokens or body.max_tokens or default
    last = len(body.messages) - 1
    if body.messages[last].role != "user" or not body.messages[last].text.strip():
        raise ApiError(
            400,
            "the last message must be the user's and have text; put the question there",
            param=f"messages[{last}]",
        )
    turns = [
        said("system" if one.role == "developer" else one.role, one.text) for one in body.messages
    ]
    if body.documents is None:
        turns = opened(joined(turns), context.settings.system_prompt)
        asked: dict[str, Any] = {"is_chat": True}
    else:
        system = (turn["content"] for turn in turns if turn["role"] == "system")
        asked = {"system": tuple(text for text in system if text.strip())}
        turns = joined(turn for turn in turns if turn["role"] != "system")
    *history, question = turns
    return work_of(
        context,
        caller,
        body,
        kind="chatcmpl",
        tokens=tokens,
        question=question["content"],
        history=tuple(Message(turn["role"], turn["content"]) for turn in history),
        **asked,
    )


class TextForm(CompletionForm):
    """Writes answers as OpenAI's text completions."""

    chunk_object = "text_completion"

    def whole(self, started: Started, answer: Answer) -> dict[str, Any]:
        return plain(
            Completion(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=[CompletionChoice(text=answer.text, finish_reason=reason_of(answer))],
                usage=Usage.of(answer.metrics),
                kvcache=self.report(started, answer),
            )
        )

    def said(self, text: str) -> dict[str, Any]:
        return {"text": text}


def completion_router(context: AppContext) -> APIRouter:
    """The route.

    Args:
        context: The server's.
    """
    routes = APIRouter(tags=["OpenAI"], route_class=CheckedRoute)

    @routes.post(
        "/v1/completions",
        response_model=Completion,
        responses={200: {"content": STREAM}, **error_responses(*ANSWERING)},
        summary="Continue a text, or answer a question over documents",
        operation_id="complete",
    )
    async def complete(
        request: Request,
        body: CompletionRequest,
        caller: Annotated[Caller, Depends(context.authenticate)],
    ) -> Response:
        """Without documents the prompt is continued as it is, without template.

        With documents it is the question that is asked over them.  With `"stream": true` the answer
        is a stream of server-sent events.
        """
        work = completion_work(context, caller, body)
        places = numbers(body.documents or ())
        form = TextForm(work.id, context.settings.name, body.includes_usage, places)
        return await respond(context, request, caller, work, form, route="completions")

    return routes


def completion_work(context: AppContext, caller: Caller, body: CompletionRequest) -> BackendRequest:
    """What a completion asks.

    Raises:
        ApiError: If a question over documents has no text, or another value cannot be used.
    """
    is_plain = body.documents is None
    if not is_plain and not body.text.strip():
        raise ApiError(400, "the prompt is empty; ask something", param="prompt")
    return work_of(
        context,
        caller,
        body,
        kind="cmpl",
        tokens=body.max_tokens or min(DEFAULT_TOKENS, context.settings.max_answer_tokens),
        question=body.text,
        is_plain=is_plain,
    )
