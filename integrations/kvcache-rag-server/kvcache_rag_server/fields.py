"""What all bodies are made of: texts, objects without further fields, and how one is refused."""

# pydantic reads the annotations when models are made, so none is postponed.
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from kvcache_rag_server.backend import BAD_REQUEST, INVALID, Failed
from kvcache_rag_server.errors import ApiError


def whole(text: str) -> str:
    """A text that can be sent; JSON can also hold halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "it is not valid Unicode") from error
    return text


Text = Annotated[str, AfterValidator(whole)]
"""A text that can be read and sent."""

SomeText = Annotated[str, Field(min_length=1), AfterValidator(whole)]
"""A text that is not empty."""


def _written(value: Any) -> Any:
    try:
        whole(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("json", "it is nothing that JSON can say") from error
    return value


JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_written)]
"""An object that can be written again as it came."""


class RequestModel(BaseModel):
    """What a client sends: no other fields, and one whose value is null is not there."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if value is not None}


def wrong(message: str, param: str) -> ApiError:
    """A request that cannot be used; `param` is the field that was wrong."""
    return ApiError(Failed(BAD_REQUEST, INVALID, message, param=param))
