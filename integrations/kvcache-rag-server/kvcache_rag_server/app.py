"""Put the server together: routes, errors and middleware."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI

from kvcache_rag_server import (
    auth,
    completions,
    errors,
    limits,
    metrics,
    middleware,
    playground,
    prefill,
    responses_route,
    status,
    validation,
)
from kvcache_rag_server.bodies import Bodies
from kvcache_rag_server.lifecycle import AppContext, Exchanges
from kvcache_rag_server.middleware import Shell
from kvcache_rag_server.packed import Recogniser
from kvcache_rag_server.shutdown import Shutdown

if TYPE_CHECKING:
    from kvcache_rag_server.backend import Backend
    from kvcache_rag_server.settings import ServerSettings

_ABOUT: Final = (
    "Answers questions over documents whose keys and values were computed once: OpenAI's API, with "
    "`documents`."
)


def build_app(backend: Backend, settings: ServerSettings) -> FastAPI:
    """Build the server's application; `app.state` has `context`, an `AppContext`, and `bodies`.

    Args:
        backend: Answers requests; its maker closes it.
        settings: Settings of the server.

    Raises:
        InvalidInputError: If the API key file cannot be used.
    """
    app = FastAPI(
        title="kvcache-rag",
        version=version("kvcache-rag"),
        description=_ABOUT,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
    )
    authenticate = auth.authenticator(settings)
    app.state.bodies = Bodies(
        settings.max_total_body_bytes, settings.max_body_bytes, settings.max_body_seconds
    )
    counting = metrics.ServerTelemetry(backend)
    exchanges, keys = Exchanges(), None
    if settings.api_keys is not None and isinstance(authenticate, auth.ByKey):
        keys = auth.KeyReloader(settings.api_keys, authenticate, exchanges)
    app.state.context = context = AppContext(
        backend=backend,
        settings=settings,
        authenticate=authenticate,
        limits=limits.RequestLimiter(settings, backend),
        telemetry=counting,
        exchanges=exchanges,
        shutdown=Shutdown(settings.grace),
        recogniser=None if settings.documents_as_text else Recogniser(),
        keys=keys,
    )
    for routes in (completions, responses_route, prefill, status, metrics, playground):
        app.include_router(routes.router(context))
    errors.install(app)
    validation.install(app)
    # Each surrounds those before it.
    app.add_middleware(Shell, bodies=app.state.bodies, shutdown=context.shutdown)
    middleware.install(app, settings, authenticate)
    metrics.install(app, counting)
    _declare_own_errors(app)
    return app


def _declare_own_errors(app: FastAPI) -> None:
    """FastAPI declares a 422 of its own for every route that reads something; ours is a 400."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = original()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the way FastAPI documents
