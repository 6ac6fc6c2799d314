"""Structured output: decoding is held to the JSON that the caller will parse.

LlamaIndex asks a local LLM for objects by its prompt alone and parses whatever comes.  Here the
schema goes along: of an output class, and of the output parsers that LlamaIndex's selectors and
question generators put into their templates.
"""

from __future__ import annotations

import json
import re
import warnings
from abc import abstractmethod
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Final, Generic

from llama_index.core.base.base_selector import MultiSelection, SingleSelection
from llama_index.core.base.llms.types import ChatResponse
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.output_parsers import PydanticOutputParser, SelectionOutputParser
from llama_index.core.program.utils import create_flexible_model
from llama_index.core.prompts.prompt_type import PromptType
from llama_index.core.question_gen.output_parser import SubQuestionOutputParser
from llama_index.core.question_gen.types import SubQuestionList
from llama_index.core.types import Model, PydanticProgramMode
from llama_index.core.vector_stores.types import VectorStoreQuerySpec
from pydantic_core import from_json

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import MissingExtraError
from kvcache_rag.integration import json_grammar
from llama_index.kvcache_rag.settings import LLMSettings
from llama_index.kvcache_rag.watching import told

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping, Sequence

    from llama_index.core.base.llms.types import ChatMessage, CompletionResponse
    from llama_index.core.program.utils import FlexibleModel
    from llama_index.core.prompts import BasePromptTemplate
    from typing_extensions import Self

_CHOICES: Final = re.compile(r"numbered list \(1 to (\d+)\)")
# Another mode asks for a program of another package, or for function calls.
_OURS: Final = (PydanticProgramMode.DEFAULT, PydanticProgramMode.LLM)


class StructuredOutput(LLMSettings):
    """An LLM whose calls take `json_schema=`, and which hands it on where LlamaIndex does not."""

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An object of a class; decoding is held to its schema.

        Args:
            output_cls: A pydantic class.
            prompt: What to ask.
            llm_kwargs: Arguments of the call, such as `max_new_tokens`.
            prompt_args: Values of the prompt's variables.

        Raises:
            InvalidInputError: If decoding cannot be held to the schema, or the answer is cut.
            MissingExtraError: If llguidance is not installed.
        """
        with told():
            twin = self._held_to(output_cls)
            found: Model = super(StructuredOutput, twin).structured_predict(
                output_cls, prompt.model_copy(), llm_kwargs, **prompt_args
            )
        return found

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """`structured_predict` that does not block the event loop."""
        with told():
            twin = self._held_to(output_cls)
            found: Model = await super(StructuredOutput, twin).astructured_predict(
                output_cls, prompt.model_copy(), llm_kwargs, **prompt_args
            )
        return found

    def stream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """`structured_predict`, as objects that grow; the last one is whole."""
        with told():
            twin = self._held_to(output_cls)
            return super(StructuredOutput, twin).stream_structured_predict(
                output_cls, prompt.model_copy(), llm_kwargs, **prompt_args
            )

    async def astream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """`stream_structured_predict` that does not block the event loop."""
        with told():
            twin = self._held_to(output_cls)
            return await super(StructuredOutput, twin).astream_structured_predict(
                output_cls, prompt.model_copy(), llm_kwargs, **prompt_args
            )

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        if self.pydantic_program_mode != PydanticProgramMode.LLM:
            return super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        prompt.output_parser, options = PydanticOutputParser(output_cls), llm_kwargs or {}
        if self.metadata.is_chat_model:
            messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
            responses: Any = self.stream_chat(messages, **options)
        else:
            responses = self.stream_complete(prompt.format(llm=self, **prompt_args), **options)
        return _objects(responses, output_cls)

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: Any,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if self.pydantic_program_mode != PydanticProgramMode.LLM:
            return await super()._structured_astream_call(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
        prompt.output_parser, options = PydanticOutputParser(output_cls), llm_kwargs or {}
        if self.metadata.is_chat_model:
            messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
            responses: Any = await self.astream_chat(messages, **options)
        else:
            text = prompt.format(llm=self, **prompt_args)
            responses = await self.astream_complete(text, **options)
        return _aobjects(responses, output_cls)

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Answer a template; for one whose output is parsed as JSON, with JSON that fits."""
        twin = self._held_by(prompt, prompt_args)
        return super(StructuredOutput, twin).predict(prompt, **prompt_args)

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """`predict` that does not block the event loop."""
        twin = self._held_by(prompt, prompt_args)
        return await super(StructuredOutput, twin).apredict(prompt, **prompt_args)

    @abstractmethod
    def with_schema(self, schema: dict[str, Any]) -> Self:
        """The same LLM, whose every answer fits a JSON schema."""

    def _held_to(self, output_cls: type[Model]) -> Self:
        if self.pydantic_program_mode not in _OURS:
            return self
        twin = self.with_schema(class_schema(output_cls))
        # A program that calls functions would ask for JSON of another form.
        twin.pydantic_program_mode = PydanticProgramMode.LLM
        return twin

    def _held_by(self, prompt: BasePromptTemplate, values: Mapping[str, Any]) -> Self:
        schema = parsed_schema(prompt, self.output_parser, values)
        if schema is None:
            return self
        try:
            return self.with_schema(schema)
        except (InvalidInputError, MissingExtraError) as error:
            # A strong model often says what is parsed; it was asked this way before.
            warnings.warn(f"decoding is not held to the JSON asked for: {error}", stacklevel=3)
            return self


# ---------------------------------------------------------------------- what will be parsed
def class_schema(output_cls: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a class, which decoding can be held to.

    Raises:
        InvalidInputError: If it is no pydantic class, or decoding cannot be held to its schema.
        MissingExtraError: If llguidance is not installed.
    """
    if not (isinstance(output_cls, type) and issubclass(output_cls, BaseModel)):
        raise InvalidInputError(f"output_cls must be a pydantic class, not {output_cls!r:.100}")
    schema: dict[str, Any] = output_cls.model_json_schema()
    json_grammar(schema)
    return schema


def parsed_schema(
    prompt: BasePromptTemplate, parser: object, values: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The JSON schema of what will be parsed of an answer; None where that is not known.

    Args:
        prompt: A template; its output parser, or what LlamaIndex made it for, tells.
        parser: The LLM's own output parser, which reads answers first.
        values: Of the template's variables.
    """
    parser = parser or prompt.output_parser
    if isinstance(parser, PydanticOutputParser):
        found: dict[str, Any] = parser.output_cls.model_json_schema()
        return found
    # A subclass may read something else.
    if type(parser) is SelectionOutputParser:
        return _selection(prompt, values)
    if type(parser) is SubQuestionOutputParser:
        return _sub_questions(values)
    if parser is None and {"schema_str", "info_str"} <= values.keys():
        # `VectorIndexAutoRetriever` keeps its parser beside the prompt.
        return VectorStoreQuerySpec.model_json_schema()
    return None


def _selection(prompt: BasePromptTemplate, values: Mapping[str, Any]) -> dict[str, Any]:
    count = values.get("num_choices")
    choice = {"type": "integer", "minimum": 1, **({"maximum": count} if count else {})}
    answer = {
        "type": "object",
        "properties": {"choice": choice, "reason": {"type": "string"}},
        "required": ["choice", "reason"],
    }
    is_single = prompt.metadata.get("prompt_type") == PromptType.SINGLE_SELECT
    most = 1 if is_single else values.get("max_outputs") or count
    limit = {"maxItems": most} if most else {}
    return {"type": "array", "items": answer, "minItems": 1, **limit}


def choosing(
    schema: type[BaseModel] | None, messages: Sequence[ChatMessage]
) -> dict[str, Any] | None:
    """The arguments of a call that chooses, as LlamaIndex's pydantic selectors have it called.

    Args:
        schema: Of the tool's arguments.
        messages: The prompt of `PydanticSingleSelector` or `PydanticMultiSelector`, which says how
            many choices there are.

    Returns:
        Only choices that exist; None where nothing is chosen.
    """
    if schema not in (SingleSelection, MultiSelection):
        return None
    counts = [_CHOICES.search(message.content or "") for message in messages]
    last = next((int(one[1]) for one in reversed(counts) if one), None)
    if last is None:
        return None
    found = schema.model_json_schema()
    selection = found["$defs"]["SingleSelection"] if schema is MultiSelection else found
    selection["properties"]["index"] = {"type": "integer", "enum": [*range(1, last + 1)]}
    if schema is MultiSelection:
        found["properties"]["selections"]["minItems"] = 1
    return found


def _sub_questions(values: Mapping[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = SubQuestionList.model_json_schema()
    schema["properties"]["items"]["minItems"] = 1
    tools = json.loads(values["tools_str"]) if "tools_str" in values else {}
    if tools:
        schema["$defs"]["SubQuestion"]["properties"]["tool_name"] = {"enum": [*tools]}
    return schema


# ---------------------------------------------------------------------- what came
class _Growing(Generic[Model]):
    """The object that the pieces of a JSON text add up to.

    LlamaIndex's own repair of unfinished JSON counts braces in strings, and then its last object
    has parts missing.
    """

    def __init__(self, output_cls: type[Model]) -> None:
        self._whole, self._partial = output_cls, create_flexible_model(output_cls)
        self._seen = ""

    def read(self, response: CompletionResponse | ChatResponse) -> list[Model | FlexibleModel]:
        """What the text so far says, if that is more than before."""
        said = response.message.content if isinstance(response, ChatResponse) else response.text
        text = said or ""
        if text == self._seen:
            return []
        self._seen = text
        try:
            values = from_json(text, allow_partial="trailing-strings")
        except ValueError:  # no more than the beginning of a name
            return []
        if not _is_json(text):
            return [self._partial.model_validate(values)]
        return [self._whole.model_validate_json(text)]


def _objects(
    responses: Generator[Any, None, None], output_cls: type[Model]
) -> Generator[Any, None, None]:
    growing = _Growing(output_cls)
    with told(), closing(responses):
        for response in responses:
            yield from growing.read(response)


async def _aobjects(
    responses: AsyncGenerator[Any, None], output_cls: type[Model]
) -> AsyncGenerator[Any, None]:
    growing = _Growing(output_cls)
    with told():
        async with aclosing(responses):
            async for response in responses:
                for found in growing.read(response):
                    yield found


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def refuse_cut(response: CompletionResponse, limit: int) -> None:
    """Refuse an answer whose JSON has not ended.

    Args:
        response: The last of a call.
        limit: Of its tokens, for the error.

    Raises:
        InvalidInputError: Saying what to change.
    """
    if _is_json(response.text):
        return
    raw: Any = response.raw
    why = (
        f"its JSON did not end within max_new_tokens={limit}; raise max_new_tokens"
        if raw["finish_reason"] == "length"
        else "a stop string or a time limit ended it before its JSON; leave them out"
    )
    raise InvalidInputError(f"the answer is cut: {why}")
