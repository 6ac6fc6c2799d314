"""Who calls: the `Authorization` header and nothing else of a request."""

# FastAPI reads the annotations of dependencies when routes are made, so they are not postponed.
from typing import Annotated, TypeAlias

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from kvcache_rag.serve.errors import ApiError
from kvcache_rag.serve.keys import METRICS_NAMESPACE, ApiKeys, new_key
from kvcache_rag.serve.lifecycle import Caller
from kvcache_rag.serve.settings import ServerSettings

__all__ = ["Anonymous", "Authenticator", "ByKey", "authenticator", "new_key"]

BEARER = HTTPBearer(
    auto_error=False, scheme_name="ApiKey", description="A key of the file --api-keys."
)


class Anonymous:
    """FastAPI dependency of a server without keys: everybody is the same caller.

    The header is ignored: clients of OpenAI always send one.
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
    """FastAPI dependency of a server with keys: who calls says the key, and nothing else."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

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
            raise ApiError(
                403,
                "this API key reads /metrics only; use the key of a tenant",
                kind="permission_error",
                code="wrong_api_key",
            )
        return caller

    def check_metrics(self, header: str) -> None:
        """Let those see `/metrics` who have a key made for it.

        Raises:
            ApiError: 401 without a known key, 403 for the key of a tenant, who is not to see how
                much the others ask.
        """
        if self._known(header).namespace != METRICS_NAMESPACE:
            raise ApiError(
                403,
                "/metrics shows all tenants, so it needs a key of its own; make one by "
                f"kvcache-rag serve --api-keys FILE --new-key {METRICS_NAMESPACE}",
                kind="permission_error",
                code="wrong_api_key",
            )

    def _known(self, header: str) -> Caller:
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("there is no API key; send the header Authorization: Bearer KEY")
        caller = self._keys.caller(key.strip())
        if caller is None:
            raise _unauthorized("the API key is not known here; ask the operator for one")
        return caller


Authenticator: TypeAlias = Anonymous | ByKey
"""What says who calls."""


def authenticator(settings: ServerSettings) -> Authenticator:
    """What says who calls a server of these settings.

    Raises:
        InvalidInputError: If the file of keys cannot be used.
    """
    if settings.api_keys is None:
        return Anonymous()
    return ByKey(ApiKeys.load(settings.api_keys))


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")
