"""OpenAI's `POST /v1/chat/completions` and `POST /v1/completions`, with `documents`."""

# FastAPI reads the annotations of routes when they are made, so they are not postponed.

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request

from kvcache_rag_server.bodies import CheckedRoute
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.lifecycle import AnswerResponse, AppContext
from kvcache_rag_server.requests import ChatRequest, CompletionRequest, chat_work, completion_work
from kvcache_rag_server.responses import (
    ANSWERING,
    STREAM,
    ChatCompletion,
    ChatForm,
    Completion,
    TextForm,
    error_responses,
)

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": STREAM},
    **error_responses(*ANSWERING),
}


def router(context: AppContext) -> APIRouter:
    """The routes.

    Args:
        context: The server's.
    """
    routes = APIRouter(tags=["OpenAI"], route_class=CheckedRoute)

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=_ANSWERS,
        summary="Answer a conversation, over documents if there are any",
        operation_id="chat",
    )
    async def chat(
        request: Request,
        body: ChatRequest,
        caller: Annotated[Caller, Depends(context.authenticate)],
    ) -> AnswerResponse:
        """The last message is the user's question.

        Documents stand before the conversation, each as one chunk; without any it is an ordinary
        conversation.  With `"stream": true` the answer is a stream of server-sent events.
        """
        work = chat_work(context, caller, body)
        form = ChatForm(work, context.settings.name, body.includes_usage)
        return AnswerResponse(context, request, caller, work, form, route="chat")

    @routes.post(
        "/v1/completions",
        response_model=Completion,
        responses=_ANSWERS,
        summary="Continue a text, or answer a question over documents",
        operation_id="complete",
    )
    async def complete(
        request: Request,
        body: CompletionRequest,
        caller: Annotated[Caller, Depends(context.authenticate)],
    ) -> AnswerResponse:
        """Without documents the prompt is continued as it is, without template.

        With documents it is the question that is asked over them.  With `"stream": true` the answer
        is a stream of server-sent events.
        """
        work = completion_work(context, caller, body)
        form = TextForm(work, context.settings.name, body.includes_usage)
        return AnswerResponse(context, request, caller, work, form, route="completions")

    return routes
