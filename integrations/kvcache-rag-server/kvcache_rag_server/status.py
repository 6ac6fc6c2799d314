"""What is served, and whether it is ready: `/v1/models`, `/health`, `/ready`."""

# FastAPI reads the annotations of routes when they are made, so they are not postponed.
import asyncio
import logging
from dataclasses import asdict
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Path

from kvcache_rag_server.backend import NOT_READY, SERVER_ERROR, Failed
from kvcache_rag_server.errors import AGAIN, ApiError
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.lifecycle import AppContext
from kvcache_rag_server.requests import check_model
from kvcache_rag_server.responses import (
    Model,
    ModelList,
    ServedIdentity,
    Status,
    error_responses,
    now,
)

_LOG: Final = logging.getLogger("kvcache_rag_server")
_PATIENCE: Final = 2.0  # seconds in which a backend has to say whether it is ready


def router(context: AppContext) -> APIRouter:
    """The routes.

    Args:
        context: The server's.
    """
    routes = APIRouter()
    began = now()

    async def served() -> Model:
        windows = await context.backend.models()
        name = context.settings.name
        return Model(id=name, created=began, max_model_len=windows.get(name))

    models = error_responses(401, 403, 500)

    @routes.get(
        "/v1/models",
        responses=models,
        tags=["OpenAI"],
        summary="The served model",
        operation_id="models",
    )
    async def list_models(
        caller: Annotated[Caller, Depends(context.authenticate)],
    ) -> ModelList:
        """There is one."""
        return ModelList(data=[await served()])

    @routes.get(
        "/v1/models/{model:path}",
        responses={**models, **error_responses(404)},
        tags=["OpenAI"],
        summary="The served model by its name",
        operation_id="model",
    )
    async def one_model(
        caller: Annotated[Caller, Depends(context.authenticate)],
        model: Annotated[str, Path(description="Its name, which may contain slashes.")],
    ) -> Model:
        """404 for any other name."""
        check_model(context, model)
        return await served()

    @routes.get(
        "/v1/identity",
        responses=error_responses(401, 403, 500, 503),
        tags=["operation"],
        summary="What a verdict on the answers is about",
        operation_id="identity",
    )
    async def identity(
        caller: Annotated[Caller, Depends(context.authenticate)],
    ) -> ServedIdentity:
        """Model, engine, storage, instruction and template, as digests; `verify` notes them."""
        return ServedIdentity(**asdict(await context.backend.identity()))

    @routes.head("/health", include_in_schema=False)
    @routes.get(
        "/health",
        responses=error_responses(500),
        tags=["operation"],
        summary="Whether the process is alive",
        operation_id="health",
    )
    async def health() -> Status:
        """It is, if it answers."""
        return Status(status="ok")

    @routes.head("/ready", include_in_schema=False)
    @routes.get(
        "/ready",
        responses=error_responses(500, 503),
        tags=["operation"],
        summary="Whether a question would be answered now",
        operation_id="ready",
    )
    async def ready() -> Status:
        """503 until the model has answered a first question to warm up."""
        if not await is_ready(context, _PATIENCE):
            message = "the model is not ready yet; ask again in a moment"
            raise ApiError(Failed(NOT_READY, SERVER_ERROR, message, AGAIN, code="not_ready"))
        return Status(status="ready")

    return routes


async def is_ready(context: AppContext, patience: float | None = None) -> bool:
    """Whether the backend says so, within so many seconds if there is a limit."""
    try:
        return await asyncio.wait_for(context.backend.ready(), patience)
    except Exception as error:  # a backend that cannot even say is not ready
        _LOG.warning("the backend does not say whether it is ready: %r", error)
        return False
