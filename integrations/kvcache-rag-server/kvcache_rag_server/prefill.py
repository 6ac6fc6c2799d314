"""`POST /v1/prefill`: compute and store documents at ingestion, before anybody asks."""

# FastAPI reads the annotations of routes when they are made, so they are not postponed.
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import ConfigDict, Field

from kvcache_rag_server.backend import BackendRequest
from kvcache_rag_server.bodies import CheckedRoute
from kvcache_rag_server.fields import RequestModel, Text
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.lifecycle import AppContext, unless_left
from kvcache_rag_server.requests import Document, check_model, chunks_of, new_id
from kvcache_rag_server.responses import ANSWERING, PrefillReply, error_responses
from kvcache_rag_server.traces import carried


class PrefillRequest(RequestModel):
    """Body of `POST /v1/prefill`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"documents": ["The red lamp stands in the hall."]}]},
    )

    documents: list[Document] = Field(description="Each is a chunk, as in a chat.")
    model: Text | None = Field(None, description="Name of the served model; it may be left out.")


def router(context: AppContext) -> APIRouter:
    """The route.

    Args:
        context: The server's.
    """
    routes = APIRouter(tags=["RAG"], route_class=CheckedRoute)

    @routes.post(
        "/v1/prefill",
        responses=error_responses(*ANSWERING),
        summary="Compute and store documents before questions need them",
        operation_id="prefill",
    )
    async def prefill(
        request: Request,
        body: PrefillRequest,
        caller: Annotated[Caller, Depends(context.authenticate)],
    ) -> PrefillReply:
        """What is stored already costs next to nothing; questions that wait come first.

        The limits are those of one request: send an ingestion in parts.  A client that goes away
        ends it; what was computed until then stays.
        """
        served = context.settings.name
        check_model(context, body.model or served)
        work = BackendRequest(
            id=new_id("prefill"),
            question="",
            chunks=tuple(chunks_of(body.documents)),
            namespace=caller.namespace,
            max_new_tokens=1,
            trace=carried(request.headers),
        )
        context.limits.check(work)
        if context.recogniser is not None:
            context.recogniser.note(caller.namespace, work.chunks)
        found = await unless_left(request, context.backend.prefill(work))
        return PrefillReply(model=served, **asdict(found))

    return routes
