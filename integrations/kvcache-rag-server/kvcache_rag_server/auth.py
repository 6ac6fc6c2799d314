"""Who calls, from the `Authorization` header and nothing else in a request."""

# FastAPI reads the annotations of dependencies when routes are made, so they are not postponed.
import asyncio
import logging
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.generation.stream import in_thread
from kvcache_rag_server.backend import PERMISSION, Failed
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.keys import METRICS_NAMESPACE, ApiKeys, Caller, new_key
from kvcache_rag_server.lifecycle import Exchanges
from kvcache_rag_server.settings import ServerSettings

__all__ = ["Anonymous", "Authenticator", "ByKey", "authenticator", "new_key"]

_LOG: Final = logging.getLogger("kvcache_rag_server")

BEARER = HTTPBearer(
    auto_error=False, scheme_name="ApiKey", description="A key of the file --api-keys."
)


class Anonymous:
    """FastAPI dependency of a server without keys: everybody is the same caller.

    The header is ignored, because OpenAI's clients always send one.
    """

    async def __call__(self) -> Caller:
        """The caller of a request."""
        return Caller()

    def caller(self, header: str) -> Caller:
        """The caller who sent this `Authorization` header."""
        del header
        return Caller()

    def check_metrics(self, header: str) -> None:
        """Everybody may see `/metrics`."""


class ByKey:
    """FastAPI dependency of a server with keys: only the key says who calls.

    Attributes:
        keys: The known keys; a new value counts from the next request on.
    """

    def __init__(self, keys: ApiKeys) -> None:
        self.keys = keys

    async def __call__(
        self,
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)],
    ) -> Caller:
        """The caller of a request.

        Raises:
            ApiError: 401 without a known key, 403 for a key of `/metrics`.
        """
        del credentials  # declared for the OpenAPI schema; the guard reads the same header
        return self.caller(request.headers.get("authorization", ""))

    def caller(self, header: str) -> Caller:
        """The caller who sent this `Authorization` header.

        Raises:
            ApiError: 401 without a known key, 403 for a key of `/metrics`.
        """
        caller = self._known(header)
        if caller.namespace == METRICS_NAMESPACE:
            raise _wrong_key("this API key reads /metrics only; use the key of a tenant")
        return caller

    def check_metrics(self, header: str) -> None:
        """Let only keys made for it see `/metrics`.

        Raises:
            ApiError: 401 without a known key, 403 for a tenant's key, because tenants must not see
                each other's load.
        """
        if self._known(header).namespace != METRICS_NAMESPACE:
            raise _wrong_key(
                "/metrics shows all tenants, so it needs a key of its own; make one by "
                f"kvcache-rag serve --api-keys FILE --new-key {METRICS_NAMESPACE}"
            )

    def _known(self, header: str) -> Caller:
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("there is no API key; send the header Authorization: Bearer KEY")
        caller = self.keys.caller(key.strip())
        if caller is None:
            raise _unauthorized("the API key is not known here; ask the operator for one")
        return caller


class KeyReloader:
    """Rereads the key file while the server runs."""

    def __init__(self, path: Path, authenticator: ByKey, exchanges: Exchanges) -> None:
        """Read `path` for `authenticator`, and end those of `exchanges` that lost their key."""
        self._path, self._authenticator, self._exchanges = path, authenticator, exchanges
        self._lock = asyncio.Lock()

    async def reload(self) -> None:
        """Take the file's current keys; if it cannot be used, all stay as they are.

        Running requests end if their key is no longer known, or is now another tenant's.
        """
        async with self._lock:  # the last call has the last word
            try:
                keys = await in_thread(ApiKeys.load, self._path)
            except InvalidInputError as error:
                _LOG.error("the API keys stay as they were: %s", error)
                return
            self._authenticator.keys = keys
        _LOG.info("%d API keys were read from %s", len(keys.known), self._path)
        self._exchanges.end(self._revoked)

    def _revoked(self, request: Request, caller: Caller) -> Failed | None:
        try:
            now = self._authenticator.caller(request.headers.get("authorization", ""))
        except ApiError as error:
            return error.failed
        is_same = now.namespace == caller.namespace
        return None if is_same else _unauthorized("the API key has become another tenant's").failed


Authenticator: TypeAlias = Anonymous | ByKey
"""Determines who calls."""


def authenticator(settings: ServerSettings) -> Authenticator:
    """The authenticator for a server with these settings.

    Raises:
        InvalidInputError: If the key file cannot be used.
    """
    if settings.api_keys is None:
        return Anonymous()
    return ByKey(ApiKeys.load(settings.api_keys))


def _unauthorized(message: str) -> ApiError:
    return ApiError(Failed(401, "authentication_error", message, code="invalid_api_key"))


def _wrong_key(message: str) -> ApiError:
    return ApiError(Failed(403, PERMISSION, message, code="wrong_api_key"))
