"""Bodies that are small in bytes and large in work: refused once they are parsed.

Every error of a body is collected before the first one is told, so a million empty messages would
keep the server busy for seconds; and whatever walks a deeply nested value may run out of stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.responses import Response

MOST_VALUES: Final = 20_000
"""Values in one body: texts, numbers, lists, objects and the names in them."""

DEEPEST: Final = 32
"""Lists and objects around a value."""


class CheckedRequest(Request):
    """A request whose JSON is neither too deep nor made of too many values."""

    async def json(self) -> Any:
        """The body as JSON.

        Raises:
            HTTPException: 400 if it is too deep or too much; FastAPI lets no other error pass.
            ValueError: If it is no JSON.
        """
        try:
            found = await super().json()
        except RecursionError as error:
            raise _refused(_too_deep()) from error
        check_json(found)
        return found


class CheckedRoute(APIRoute):
    """A route that reads its body as a `CheckedRequest`: `APIRouter(route_class=CheckedRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the check."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handle(CheckedRequest(request.scope, request.receive))

        return checked


def check_json(value: Any) -> None:
    """Refuse JSON that is too deep, or made of too many values.

    Raises:
        HTTPException: 400.
    """
    layer, depth, count = [value], 0, 1
    while layer:
        if depth > DEEPEST:
            raise _refused(_too_deep())
        below: list[Any] = []
        for one in layer:
            if isinstance(one, (dict, list)):
                count += len(one) * (2 if isinstance(one, dict) else 1)
                below.extend(one.values() if isinstance(one, dict) else one)
            if count > MOST_VALUES:
                raise _refused(
                    f"the body is made of more than the {MOST_VALUES} values that are allowed; "
                    "send fewer messages or documents"
                )
        layer, depth = below, depth + 1


def _too_deep() -> str:
    return f"the body is nested deeper than the {DEEPEST} levels that are allowed; send it flatter"


def _refused(message: str) -> HTTPException:
    return HTTPException(400, message)
