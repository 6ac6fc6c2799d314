"""A JSON schema as a grammar over tokens, and as a logits processor."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small import make_model, make_tokenizer

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import MissingExtraError
from kvcache_rag.generation import grammar
from kvcache_rag.integration import JsonGrammars, json_grammar, json_instruction

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def grammars() -> JsonGrammars:
    return JsonGrammars(make_model(), make_tokenizer())


def test_a_prompt_that_is_one_token_longer_begins_anew(grammars: JsonGrammars) -> None:
    processor, tokenizer = grammars.processor({"enum": [1]}), make_tokenizer()
    scores = torch.zeros(1, 99)
    first = processor(torch.tensor([[5, 6, 7]]), scores)
    again = processor(torch.tensor([[8, 6, 7, 9]]), scores)
    assert torch.equal(first, again)
    (one,) = tokenizer("1", add_special_tokens=False)["input_ids"]
    assert first.isfinite().nonzero().tolist() == [[0, one]]
    ended = processor(torch.tensor([[8, 6, 7, 9, one]]), scores)
    assert ended.isfinite().nonzero().tolist() == [[0, tokenizer.eos_token_id]]


def test_rows_of_a_batch_are_held_each_by_itself(grammars: JsonGrammars) -> None:
    tokenizer = make_tokenizer()
    one, two = tokenizer("12", add_special_tokens=False)["input_ids"]
    processor, scores = grammars.processor({"enum": [1, 21]}), torch.zeros(2, 99)
    processor(torch.tensor([[5, 6], [7, 8]]), scores)
    rows = processor(torch.tensor([[5, 6, one], [7, 8, two]]), scores)
    assert rows.isfinite().nonzero().tolist() == [[0, tokenizer.eos_token_id], [1, one]]


def test_a_schema_is_compiled_once(grammars: JsonGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    tokens, compiled = grammar._tokens, grammar.json_grammar
    monkeypatch.setattr(grammar, "_tokens", lambda *of: made.append("tokens") or tokens(*of))
    monkeypatch.setattr(
        grammar, "json_grammar", lambda schema: made.append("schema") or compiled(schema)
    )
    for allowed in ([1], [1], [2], [1]):
        grammars.processor({"enum": allowed})
    assert made == ["schema", "tokens", "schema"]


def test_a_model_without_an_end_is_refused() -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    with pytest.raises(InvalidInputError, match="needs a model with an end-of-sequence token"):
        JsonGrammars(model, SimpleNamespace(eos_token_id=None)).processor({"enum": [1]})


def test_the_schema_is_told_word_for_word() -> None:
    schema = {"enum": ["käse"]}
    assert json_instruction(schema).endswith(json.dumps(schema, ensure_ascii=False))
    with pytest.raises(InvalidInputError, match="must be a JSON schema, a dict"):
        json_instruction("käse")


@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"type": "object", "minimum": {1}}])
def test_a_schema_of_no_use_is_said(schema: Any) -> None:
    with pytest.raises(InvalidInputError, match="cannot be held to this schema"):
        json_grammar(schema)


def nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = wrap(schema)
    return schema


SIZES: dict[str, Callable[[int], Any]] = {
    "properties": lambda n: {"properties": {f"p{at}": {"type": "string"} for at in range(n)}},
    "alternatives": lambda n: {"anyOf": [{"const": at} for at in range(n)]},
    "a chain of references": lambda n: {
        "$defs": {f"d{at}": {"items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(n)},
        "$ref": "#/$defs/d0",
    },
    "levels of objects": lambda n: nested(n, lambda one: {"properties": {"a": one}}),
    "levels of lists": lambda n: nested(n, lambda one: {"items": one}),
    "levels of both": lambda n: nested(n, lambda one: {"allOf": [one]}),
    "levels of nothing known": lambda n: {"default": nested(n, lambda one: [one])},
}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("size", [1_200, 100_000])
def test_a_schema_that_is_too_large_is_refused_at_once(
    grammars: JsonGrammars, kind: str, size: int
) -> None:
    """Ten thousand properties held a server up for 15 seconds, a chain of references ended it."""
    schema = SIZES[kind](size)
    said = "more than 1000 objects|nested in more than 200 levels"
    for read in (grammars.processor, json_grammar, json_instruction):
        with pytest.raises(InvalidInputError, match=said):
            read(schema)


def test_a_schema_that_holds_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(InvalidInputError, match="held to this schema"):
        json_grammar(schema)


def test_a_large_enough_schema_is_taken(grammars: JsonGrammars) -> None:
    grammars.processor(SIZES["properties"](900))
    grammars.processor({"enum": [f"value {at}" for at in range(5000)]})


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError) as error:
        json_grammar({"enum": [1]})
    assert str(error.value) == "llguidance is not installed: pip install 'kvcache-rag[structured]'"


def test_only_objects_that_say_nothing_are_closed() -> None:
    schema = {
        "properties": {
            "properties": {"properties": {"a": {}}, "additionalProperties": True},
            "b": {"items": {"properties": {"c": {}}}},
        },
        "$defs": {"d": {"type": "object"}},
    }
    assert grammar.closed(schema) == {
        "properties": {
            "properties": {"properties": {"a": {}}, "additionalProperties": True},
            "b": {"items": {"properties": {"c": {}}, "additionalProperties": False}},
        },
        "$defs": {"d": {"type": "object"}},
        "additionalProperties": False,
    }
