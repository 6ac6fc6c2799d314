"""Middleware around every request.

`Guard` refuses before a byte of the body is read.  A server on loopback is reached by every web
page that its user's browser shows.  Pages are kept out twice: a page that lets its own name point
to this machine (DNS rebinding) sends that name as `Host`, and a page that sends requests across
origins sends its own `Origin`.  Both are refused unless the operator allowed them.  Keys are looked
at here too, and requests counted, because FastAPI reads and parses bodies before it asks who calls.

`Shell`, inside of it, gives a request its name, limits its body, and is the last net for errors.
"""

from __future__ import annotations

import asyncio
import ipaddress
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware

from kvcache_rag_server.backend import INVALID, PERMISSION, Failed
from kvcache_rag_server.errors import SHUT_DOWN, ApiError, http_failure, response
from kvcache_rag_server.limits import Places
from kvcache_rag_server.settings import is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from kvcache_rag_server.auth import Authenticator
    from kvcache_rag_server.bodies import Bodies
    from kvcache_rag_server.keys import Caller
    from kvcache_rag_server.settings import ServerSettings
    from kvcache_rag_server.shutdown import Shutdown


ANY: Final = "*"

# Written or not; in front of a server without TLS there may be a proxy that has it.
_USUAL_PORTS: Final = (None, 80, 443)

BODILESS: Final = ("GET", "HEAD")
"""Methods whose requests have no body and ask nothing of the model, so they need no place."""

_ALIVE: Final = "/health"

_SHOWN = 100  # letters of a name in messages


class Shell:
    """ASGI middleware around all routes.

    Every answer says the request's name in `x-request-id`; the log knows failures by it.  A body
    is refused as soon as it is known to be too large, for itself or beside the others, or has not
    come in time.
    """

    def __init__(self, app: ASGIApp, bodies: Bodies, shutdown: Shutdown) -> None:
        """Let `app` answer requests, whose bodies come by `bodies`, until the server ends."""
        self._app, self._bodies, self._shutdown = app, bodies, shutdown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = f"req_{uuid.uuid4().hex}"
        scope["kvcache_rag.request_id"] = name
        has_begun = False

        async def named(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(raw=message["headers"])["x-request-id"] = name
            await send(message)

        try:
            self._check(scope["path"])
            length = Headers(scope=scope).get("content-length", "")
            with self._bodies.incoming(receive, length) as body:
                await self._app(scope, body, named)
        except Exception as error:
            failed = http_failure(error, scope)
            if has_begun:  # too late to say anything: the connection breaks off
                raise
            await response(failed)(scope, receive, named)
        except asyncio.CancelledError:
            if not self._shutdown.is_cutting:
                raise
            # It ends by itself: uvicorn would answer what is cancelled with a bare 500.
            if not has_begun:
                await response(SHUT_DOWN)(scope, receive, named)

    def _check(self, path: str) -> None:
        if self._shutdown.is_begun and path != _ALIVE:
            raise ApiError(SHUT_DOWN)
        if path.endswith("\n"):  # routes also match a path with a line break behind it
            message = "no path here ends in a line break; leave %0A out"
            raise ApiError(Failed(404, INVALID, message, code="unknown_url"))


@dataclass(frozen=True)
class HostRule:
    """Which names a server answers to, and pages of which origins may ask it.

    Attributes:
        hosts: Names of this server, in small letters and without port; "*" for any.
        addresses: "any" IP address as a name, those of "loopback" only, or "none".
        origins: Origins of other servers, such as "https://app.example.org".
    """

    hosts: frozenset[str] = frozenset({"localhost"})
    addresses: str = "loopback"
    origins: frozenset[str] = frozenset()

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> HostRule:
        """The rule for a server of these settings.

        On loopback it is this machine's names and what was allowed.  Beyond, with keys and nothing
        said, it is any name: a page has no key to send.  Without keys it is any address (a rebound
        name is never one) and what was allowed.
        """
        allowed = {entry.lower() for entry in settings.allowed_hosts}
        origins = frozenset(entry.lower().rstrip("/") for entry in settings.allowed_origins)
        if not is_loopback(settings.host):
            if settings.api_keys and not allowed:
                allowed = {ANY}
            named = {settings.host.lower(), "localhost", *allowed}
            return cls(frozenset(named), "any", origins)
        return cls(frozenset({"localhost", *allowed}), "loopback", origins)

    def check(self, headers: Headers) -> None:
        """Refuse a request of another name or another origin.

        Raises:
            ApiError: 403 that says how to allow it.
        """
        hosts = headers.getlist("host")
        host = hosts[0] if len(hosts) == 1 else ""
        name = _name(host)
        if not self._answers_to(name):
            raise _refused(
                f"this server does not answer to the host name {name[:_SHOWN]!r}; use localhost, "
                "or start it with --allowed-hosts NAME",
                "host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None or origin.lower() in self.origins:
            return
        if _place(origin) != _place(f"//{host}"):
            raise _refused(
                f"pages of {origin[:_SHOWN]!r} may not use this server; start it with "
                "--allowed-origins ORIGIN to let them",
                "origin_not_allowed",
            )

    def _answers_to(self, name: str) -> bool:
        if name and (ANY in self.hosts or name in self.hosts):
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self.addresses == "any" or (self.addresses == "loopback" and address.is_loopback)


class Guard:
    """ASGI middleware: host, origin, key, and a place of the caller's, in this order."""

    def __init__(
        self, app: ASGIApp, rule: HostRule, authenticator: Authenticator, places: Places
    ) -> None:
        """Let `app` answer what passes."""
        self._app, self._rule, self._authenticator = app, rule, authenticator
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or say why not."""
        if scope["type"] == "websocket":  # there is none to talk to
            await send({"type": "websocket.close", "code": 1008})
            return
        with ExitStack() as stack:
            if scope["type"] == "http":
                try:
                    caller = self._check(scope)
                    if caller is not None and scope["method"] not in BODILESS:
                        stack.enter_context(self._places.place(caller))
                except ApiError as error:
                    await response(error.failed)(scope, receive, send)
                    return
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> Caller | None:
        """Who calls; None where anybody may."""
        headers = Headers(scope=scope)
        self._rule.check(headers)
        path, sent = scope["path"], headers.get("authorization", "")
        # By their beginnings: routes also match paths that end in a line break.
        if path.startswith("/metrics"):
            self._authenticator.check_metrics(sent)
        elif path.startswith("/v1"):
            return self._authenticator.caller(sent)
        return None


def install(app: FastAPI, settings: ServerSettings, authenticator: Authenticator) -> None:
    """Guard `app`; to be called after all middleware that reads bodies was added."""
    app.add_middleware(
        Guard,
        rule=HostRule.from_settings(settings),
        authenticator=authenticator,
        places=Places(settings),
    )
    if settings.allowed_origins:
        # In front of the guard: a browser asks beforehand, without a key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.rstrip("/") for origin in settings.allowed_origins],
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )


def _name(host: str) -> str:
    """The name in a `Host` header, without port; "" if there is none."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]" if "]" in host else ""
    return host.partition(":")[0].lower().rstrip(".")


def _place(url: str) -> tuple[str, int | None]:
    """Host and unusual port of a URL; "" if it has none (such as the origin "null")."""
    try:
        parts = urlsplit(url)
        port = None if parts.port in _USUAL_PORTS else parts.port
    except ValueError:
        return "", None
    return (parts.hostname or "").rstrip("."), port


def _refused(message: str, code: str) -> ApiError:
    return ApiError(Failed(403, PERMISSION, message, code=code))
