"""Fields of OpenAI's requests about tools and forms of answers, and what they mean here."""

# pydantic reads the annotations when models are made, so none is postponed.
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from kvcache_rag.generation.tools import ToolChoice
from kvcache_rag_server.fields import JsonObject, RequestModel, SomeText, Text, wrong

ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
"""The schema of `{"type": "json_object"}`."""

RESERVED: Final = frozenset({"none", "auto", "required"})
"""What `tool_choice` says without naming a tool."""

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class CalledFunction(RequestModel):
    """What was called, and with what."""

    name: SomeText
    arguments: Text = Field("{}", description="An object in JSON.")
    parsed_arguments: JsonValue | None = Field(None, description="Ignored; clients add it.")


class SentCall(RequestModel):
    """A call of a tool in an earlier answer."""

    id: SomeText
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Ignored; streams have it.")

    def turn(self, where: str) -> dict[str, Any]:
        """The call as chat templates read it.

        Raises:
            ApiError: If its arguments are no object.
        """
        try:
            arguments = json.loads(self.function.arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise wrong("the arguments of a call must be an object in JSON", where)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class FunctionTool(RequestModel):
    """A function that the answer may call."""

    name: Name
    description: Text | None = None
    parameters: JsonObject | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(
        None,
        description="Whether a schema with keywords that no grammar holds is refused.",
    )

    @property
    def described(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        about: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        if self.strict:
            about["strict"] = True
        return {"type": "function", "function": {**about, "parameters": parameters}}


class Tool(RequestModel):
    """A tool; there are functions only."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(RequestModel):
    """The name of a function."""

    name: SomeText


class NamedTool(RequestModel):
    """The one tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


def text_or(kind: str) -> Discriminator:
    """Tells a text from something else, by their tags."""
    return Discriminator(lambda given: "(string)" if isinstance(given, str) else kind)


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(string)")]
    | Annotated[NamedTool, Tag("(mapping)")],
    text_or("(mapping)"),
]


def choice_of(
    tools: Sequence[FunctionTool], choice: str | None, parallel: bool | None
) -> ToolChoice | None:
    """Tools of an answer; None where there are none.

    Args:
        tools: That there are.
        choice: "none", "auto", "required", or the name of one.
        parallel: Whether one answer may call several; None for yes.

    Raises:
        ApiError: If two have one name, or the one that is chosen is not there.
    """
    names = [one.name for one in tools]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise wrong(f"two tools are named {double!r}; give each a name of its own", "tools")
    if choice not in (None, "none", "auto", *(["required"] if names else []), *names):
        known = f"there is {', '.join(names)}" if names else "there are no tools"
        raise wrong(f"tool_choice wants {choice!r}, and {known}", "tool_choice")
    if not names:
        return None
    return ToolChoice.of([one.described for one in tools], choice, parallel)


class JsonSchema(RequestModel):
    """The form of an answer in JSON."""

    name: Name
    description: Text | None = Field(None, description="Ignored; say it in a message.")
    schema_: JsonObject = Field(ANY_OBJECT, alias="schema")
    strict: bool | None = Field(None, description="Ignored: answers fit the schema in any case.")


class TextFormat(RequestModel):
    """Plain text."""

    type: Literal["text"]

    @property
    def held_to(self) -> dict[str, Any] | None:
        """The schema that an answer fits; None for any text."""
        return None


class ObjectFormat(RequestModel):
    """Any object in JSON."""

    type: Literal["json_object"]

    @property
    def held_to(self) -> dict[str, Any] | None:
        """The schema that an answer fits."""
        return ANY_OBJECT


class SchemaFormat(RequestModel):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @property
    def held_to(self) -> dict[str, Any] | None:
        """The schema that an answer fits."""
        return dict(self.json_schema.schema_)


def _format(given: Any) -> str | None:
    kind = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)
    return f"({kind})" if kind in ("text", "json_object", "json_schema") else None


BY_TYPE: Final = Discriminator(
    _format,
    custom_error_type="form",
    custom_error_message="its type must be text, json_object or json_schema",
)
"""Tells forms of answers apart."""

ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("(text)")]
    | Annotated[ObjectFormat, Tag("(json_object)")]
    | Annotated[SchemaFormat, Tag("(json_schema)")],
    BY_TYPE,
]
