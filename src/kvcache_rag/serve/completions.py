"""`POST /v1/completions`: continues a text; with documents, answers a question over them."""

# FastAPI reads the annotations of routes when they are made, so they are not postponed.
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from kvcache_rag.metrics import Answer
from kvcache_rag.serve.bodies import CheckedRoute
from kvcache_rag.serve.chat import STREAM
from kvcache_rag.serve.context import AppContext, Caller
from kvcache_rag.serve.errors import ApiError
from kvcache_rag.serve.exchange import respond
from kvcache_rag.serve.forms import CompletionForm, reason_of
from kvcache_rag.serve.replies import (
    ANSWERING,
    Completion,
    CompletionChoice,
    KVCacheReport,
    Usage,
    error_responses,
    plain,
)
from kvcache_rag.serve.schema import CompletionRequest
from kvcache_rag.serve.work import Started, Work
from kvcache_rag.serve.working import work_of

DEFAULT_TOKENS: Final = 16
"""Of an answer that says nothing else, as at OpenAI."""


class TextForm(CompletionForm):
    """Writes answers as OpenAI's text completions."""

    chunk_object = "text_completion"

    def whole(self, started: Started, answer: Answer) -> dict[str, Any]:
        """A `text_completion`."""
        return plain(
            Completion(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=[CompletionChoice(text=answer.text, finish_reason=reason_of(answer))],
                usage=Usage.of(answer.metrics),
                kvcache=KVCacheReport.of(started, answer.metrics),
            )
        )

    def said(self, text: str) -> dict[str, Any]:
        """A text."""
        return {"text": text}


def router(context: AppContext) -> APIRouter:
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
        form = TextForm(work.id, context.settings.name, body.includes_usage)
        return await respond(context, request, caller, work, form, route="completions")

    return routes


def completion_work(context: AppContext, caller: Caller, body: CompletionRequest) -> Work:
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
        tokens=body.max_tokens or min(DEFAULT_TOKENS, context.settings.limits.answer_tokens),
        question=body.text,
        is_plain=is_plain,
    )
