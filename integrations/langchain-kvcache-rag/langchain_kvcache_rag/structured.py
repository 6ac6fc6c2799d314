"""Structured output: decoding is held to a JSON schema, so every model's objects fit it.

A tokenizer and a schema make a grammar (llguidance); before each token, what the grammar does not
allow is ruled out.
"""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration
from langchain_core.runnables import RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from typing_extensions import is_typeddict

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import json_grammar

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel, LanguageModelInput
    from langchain_core.outputs import Generation
    from langchain_core.runnables import Runnable

_METHODS: Final = ("json_schema", "function_calling", "json_mode")
_SAYING: Final = frozenset(
    ("$ref", "allOf", "anyOf", "const", "enum", "items", "oneOf", "properties", "type")
)


def structured_output(
    llm: BaseChatModel, schema: Any, include_raw: bool, kwargs: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """A chain of the chat model, held to a schema, and a parser of its answers.

    Args:
        llm: Answers.
        schema: A pydantic class, a TypedDict or a JSON schema.
        include_raw: Whether errors of parsing are handed on beside the message.
        kwargs: `method`, `strict`, and arguments of each call.

    Raises:
        MissingExtraError: If llguidance is not installed.
        InvalidInputError: If method or schema cannot be used.
    """
    method = kwargs.pop("method", None) or "json_schema"
    kwargs.pop("strict", None)
    if method not in _METHODS:
        raise InvalidInputError(f"method must be one of {', '.join(_METHODS)}, not {method!r}")
    plain = json_schema(schema)
    json_grammar(plain)
    bound = llm.bind(
        json_schema=plain,
        ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
        **kwargs,
    )
    parser: Runnable[Any, Any]
    parser = _PydanticParser(pydantic_object=schema) if _is_pydantic(schema) else _JsonParser()
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def json_schema(schema: Any) -> dict[str, Any]:
    """The JSON schema that a pydantic class, a TypedDict, or a function's description stands for.

    Raises:
        InvalidInputError: If it is none of these.
    """
    sentence = f"a schema is a pydantic class, a TypedDict or a JSON schema, not {schema!r:.100}"
    try:
        if _is_pydantic(schema):
            written = getattr(schema, "model_json_schema", None) or schema.schema  # pydantic.v1
            return dict(written())
        if isinstance(schema, dict):
            found = _unwrapped(schema)
            if not _SAYING & {*found}:
                raise InvalidInputError(sentence)  # every JSON text would fit it
            return found
        if isinstance(schema, type) and not (is_typeddict(schema) or is_dataclass(schema)):
            raise InvalidInputError(sentence)  # LangChain would read its constructor
        return dict(convert_to_json_schema(schema))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(sentence) from error


def schema_of_format(response_format: Any) -> dict[str, Any]:
    """The JSON schema in a `response_format`, as OpenAI has it and LangChain's agents bind it.

    Raises:
        InvalidInputError: If it is of another kind.
    """
    if not isinstance(response_format, dict) or response_format.get("type") != "json_schema":
        raise InvalidInputError(
            'response_format must be {"type": "json_schema", "json_schema": {"schema": ...}}, not '
            f"{response_format!r:.100}; or use with_structured_output"
        )
    return json_schema(response_format)


def _unwrapped(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema in what different providers call a function, a tool or a response format."""
    kind = schema.get("type")
    inner = schema.get(kind) if kind in ("function", "json_schema") else schema
    if isinstance(inner, dict):
        for name in ("parameters", "input_schema", "schema"):
            if isinstance(inner.get(name), dict):
                return dict(inner[name])
    return dict(schema)


def _is_pydantic(schema: Any) -> bool:
    return isinstance(schema, type) and (
        hasattr(schema, "model_json_schema") or hasattr(schema, "parse_obj")
    )


class _JsonParser(JsonOutputParser):
    """Parses pieces as far as they go, and an answer that has ended only if it is whole."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The object so far, or the whole one."""
        ended = _check_whole(result)
        return super().parse_result(result, partial=partial and not ended)


class _PydanticParser(PydanticOutputParser[Any]):
    """The same, as objects of a class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The object; None for pieces that are none yet."""
        ended = _check_whole(result)
        return super().parse_result(result, partial=partial and not ended)


def _check_whole(result: list[Generation]) -> bool:
    """Whether the answer has ended; raises if it has without its JSON being whole.

    LangChain's parsers complete what has been cut, which would give an object with parts missing.
    """
    generation = result[0]
    if not isinstance(generation, ChatGeneration):
        return False
    reason = generation.message.response_metadata.get("finish_reason")
    if reason is None:
        return False
    try:
        json.loads(generation.text)
    except ValueError as error:
        why = (
            "max_tokens were used up before its JSON ended; raise max_tokens"
            if reason == "length"
            else "a stop string or the timeout ended it before its JSON; leave them out"
        )
        raise OutputParserException(
            f"the answer is cut: {why}", llm_output=generation.text
        ) from error
    return True
