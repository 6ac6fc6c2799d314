"""The playground page, and what it shows of a prompt: `/`, `/playground/…` and `/v1/explain`.

The page is plain files of this package.  Nothing is loaded from elsewhere, and its policy says so
to the browser: no script or style but those files, no connection but to this server.
"""

import asyncio
import hashlib
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.responses import Response

from kvcache_rag.generation.explain import TokenState
from kvcache_rag.kv.mask import PositionScheme
from kvcache_rag.models.model_names import TINY
from kvcache_rag.stitching.stitch import SpanKind
from kvcache_rag_server.backend import INVALID, Failed
from kvcache_rag_server.bodies import CheckedRoute
from kvcache_rag_server.differing import difference
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.fields import RequestModel, Text
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.lifecycle import AppContext, unless_left
from kvcache_rag_server.requests import ChatRequest, chat_work
from kvcache_rag_server.responses import ANSWERING, error_responses

PAGE: Final = "index.html"

MOST_SAID: Final = 4000
"""Letters of an answer that is compared; comparing costs more than they grow."""

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Kept, but asked for again each time: an update of the package is seen at once.
    "Cache-Control": "no-cache",
}

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Asset:
    """A file of the page.

    Attributes:
        content: Its bytes.
        media_type: Of the `Content-Type` header.
        etag: Names this content.
    """

    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """The file, or 304 where the browser has it already."""
        headers = {**HEADERS, "ETag": self.etag}
        known = (tag.strip() for tag in request.headers.get("if-none-match", "").split(","))
        if any(tag.removeprefix("W/") == self.etag or tag == "*" for tag in known):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def assets() -> dict[str, Asset]:
    """The files of the page by name, as they are installed."""
    page_assets = {}
    for file in (files("kvcache_rag_server") / "playground").iterdir():
        media_type = _TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            page_assets[file.name] = Asset(content, media_type, etag)
    return page_assets


class PageConfig(BaseModel):
    """What the page has to know before it asks anything; nothing of it is secret.

    Attributes:
        needs_key: Whether requests need an API key.
        reader: Whether the packaged reader answers, which reads sentences of its own kind.
        auxiliary: Whether there is a model that chooses tokens for CacheClip.
        documents: That a question may have.
        file_bytes: That a file may have.
        policy: Of requests that name none, as `policy_by_name` reads it; "" if nobody can say it.
        warnings: Of others, by name: what they may cost the model.
    """

    needs_key: bool
    reader: bool
    auxiliary: bool
    documents: int
    file_bytes: int
    policy: str
    warnings: dict[str, str]


Said = Annotated[Text, Field(max_length=MOST_SAID)]


class Answers(RequestModel):
    """Two answers of which the page shows where they differ.

    Attributes:
        full: By full prefill.
        stitched: From cached chunks.
    """

    full: Said
    stitched: Said


class TokenReply(BaseModel):
    """One token of a prompt."""

    id: int
    text: str = Field(description="What it adds to the prompt's text.")
    position: int = Field(description="At which its keys stand when the model answers.")
    state: TokenState


class SpanReply(BaseModel):
    """A run of tokens of a prompt, half-open."""

    kind: SpanKind
    start: int
    stop: int
    tier: str = Field(description="From which a chunk would be loaded, or empty.")


class Explanation(BaseModel):
    """A prompt, token by token, and what is reused of it; counts as in `kvcache` of an answer."""

    tokens: list[TokenReply]
    spans: list[SpanReply]
    policy: str = Field(description="The policy that answers, with its numbers.")
    positions: PositionScheme
    gate: str = Field(description="Why a full prefill answers instead of the policy, or empty.")
    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    prefilled_tokens: int
    query_tokens: int
    choose: float = Field(description="Seconds for choosing tokens, where the policy does.")
    fresh_tokens: int = Field(description="Of chunks that are computed with the question.")
    unused_chunks: int = Field(
        description="Documents left out because the policy answers from better ones."
    )
    answered_from: list[int] = Field(
        description="Numbers, from 0, of the documents in the prompt, in its order."
    )


def router(context: AppContext) -> APIRouter:
    """The routes.

    Args:
        context: The server's.
    """
    routes, page_assets = APIRouter(route_class=CheckedRoute), assets()

    @routes.head("/", include_in_schema=False)
    @routes.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return page_assets[PAGE].response(request)

    @routes.get("/playground/config", include_in_schema=False)
    async def config() -> JSONResponse:
        settings, own = context.settings, await context.backend.own_policy()
        page_config = PageConfig(
            needs_key=settings.api_keys is not None,
            reader=settings.model == TINY,
            auxiliary=settings.auxiliary is not None,
            documents=settings.max_documents,
            file_bytes=settings.max_body_bytes,
            policy=settings.policy or own.name,
            warnings=dict(own.warnings),
        )
        return JSONResponse(page_config.model_dump(), headers={"Cache-Control": "no-store"})

    @routes.get("/playground/{name}", include_in_schema=False)
    async def asset(request: Request, name: str) -> Response:
        if name not in page_assets or name == PAGE:
            message = f"there is no {request.url.path} here"
            raise ApiError(Failed(404, INVALID, message, code="unknown_url"))
        return page_assets[name].response(request)

    @routes.post("/v1/playground/compare", include_in_schema=False)
    async def compare(
        body: Answers, _: Annotated[Caller, Depends(context.authenticate)]
    ) -> JSONResponse:
        found = await asyncio.to_thread(difference, body.full, body.stitched)
        parts = {"full": found.first, "stitched": found.second}
        return JSONResponse(
            {"same": found.same, **{name: list(map(asdict, of)) for name, of in parts.items()}}
        )

    @routes.post(
        "/v1/explain",
        tags=["Playground"],
        response_model=Explanation,
        responses=error_responses(*ANSWERING),
        summary="Which tokens of a prompt are reused, and which are computed",
        operation_id="explain",
    )
    async def explain(
        request: Request,
        body: ChatRequest,
        caller: Annotated[Caller, Depends(context.authenticate)],
    ) -> Response:
        """Takes the body of a chat with documents, and generates nothing.

        A policy that chooses tokens by their keys and values has missing chunks prefilled and
        stored, as an answer would; with `reuse` or `full` nothing is computed.
        """
        if body.documents is None:
            message = "there are no documents to explain; give documents, an empty list for none"
            raise ApiError(Failed(400, INVALID, message, param="documents"))
        work = chat_work(context, caller, body)
        await context.limits.admit(work)
        explanation = await unless_left(request, context.backend.explain(work))
        used = [work.places[at] for at in explanation["answered_from"]]
        return JSONResponse({**explanation, "answered_from": used})

    return routes
