"""A JSON schema as a grammar over tokens, and as a logits processor."""

from __future__ import annotations

import json
import random
import re
import sys
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small import make_model, make_tokenizer
from test_prompt_tokens import NAMES, control, tokenizer_of
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers_zoo import byte_level
from transformers import PreTrainedTokenizerFast

from kvcache_rag import Engine, InvalidInputError, PromptTemplate
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


def test_a_model_without_an_end_is_refused() -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    with pytest.raises(InvalidInputError, match="needs a model with an end-of-sequence token"):
        JsonGrammars(model, SimpleNamespace(eos_token_id=None)).processor({"enum": [1]})


def test_the_schema_is_told_word_for_word() -> None:
    schema = {"enum": ["käse"]}
    assert json_instruction(schema).endswith(json.dumps(schema, ensure_ascii=False))
    with pytest.raises(InvalidInputError, match="must be a JSON schema, a dict"):
        json_instruction("käse")


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["items"] = HOLDS_ITSELF


@pytest.mark.parametrize(
    "schema",
    [{"type": "nothing"}, {"type": "object", "minimum": {1}}, HOLDS_ITSELF],
    ids=["type", "value", "itself"],
)
def test_a_schema_of_no_use_is_said(schema: Any) -> None:
    with pytest.raises(InvalidInputError, match="held to this schema"):
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


# ---------------------------------------------------------------------- what a schema forces
LIST_OF_ONE = {"type": "array", "minItems": 1, "maxItems": 1}
OBJECT_OF_ONE = {"type": "object", "maxProperties": 1}
ENUM_ALONE = {"type": "object", "required": ["enum"]}
FORCED: dict[str, Callable[[str], tuple[Any, Any]]] = {
    "enum": lambda text: ({"enum": [text]}, text),
    "const": lambda text: ({"const": {"a": [text, 1]}}, {"a": [text, 1]}),
    "a name": lambda text: (
        {"type": "object", "properties": {text: {"const": 1}}, "required": [text]},
        {text: 1},
    ),
    "a name that is required only": lambda text: (
        {"required": [text], "additionalProperties": {"const": 1}, **OBJECT_OF_ONE},
        {text: 1},
    ),
    "pattern": lambda text: ({"type": "string", "pattern": f"^{re.escape(text)}$"}, text),
    "anyOf": lambda text: ({"anyOf": [{"const": text}]}, text),
    "allOf": lambda text: ({"allOf": [{"type": "string"}, {"const": text}]}, text),
    "items": lambda text: ({**LIST_OF_ONE, "items": {"const": text}}, [text]),
    "$ref": lambda text: ({"$ref": "#/$defs/enum", "$defs": {"enum": {"const": text}}}, text),
    "nested": lambda text: (
        {**LIST_OF_ONE, "prefixItems": [{"properties": {"enum": {"const": text}}, **ENUM_ALONE}]},
        [{"enum": text}],
    ),
}


@lru_cache
def grammars_of(tokenizer: Any) -> JsonGrammars:
    end = tokenizer.all_special_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=end))
    return JsonGrammars(model, tokenizer)


def answered(tokenizer: Any, schema: Any) -> Any:
    """What a model says that takes any token that it may take."""
    grammars, chance = grammars_of(tokenizer), random.Random(7)
    processor = grammars.processor(schema)
    ids: list[int] = []
    while len(ids) < 500:
        row = processor(torch.tensor([[1, *ids]]), torch.zeros(1, len(tokenizer)))[0]
        allowed = row.isfinite().nonzero().flatten().tolist()
        token = chance.choice(allowed)
        if token == grammars._model.generation_config.eos_token_id:
            break
        ids.append(token)
    assert not {*ids} & {*tokenizer.all_special_ids}
    return json.loads(
        tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_forced_is_written_as_text_or_refused(name: str) -> None:
    """It ended as `{"k": "` with "stop": the tokenizer read the literal of an end as the end."""
    tokenizer, written = tokenizer_of(name), 0
    literals = ["<s>", "<|im_end|>", "é", "e\u0301", "two  words ", "東", "\ufffd", 'a"\\<']
    for text in [*literals, *list(control(tokenizer).values())[:6]]:
        try:
            said = answered(tokenizer, {"const": text})
            written += 1
        except InvalidInputError as error:
            said = str(error).partition("no tokens to write ")[2].removesuffix(" with")
            said = json.loads(said)
        assert said == text
    # The others have no token for quotation marks, or these for control tokens alone.
    has_all = name not in ("metaspace", "word pieces", "unigram", "spaced pieces")
    assert (written > 5) is has_all


@pytest.mark.parametrize("kind", FORCED)
@pytest.mark.parametrize("text", ["<|im_end|>", "<file_sep>", "né"])
def test_whatever_forces_it(kind: str, text: str) -> None:
    schema, expected = FORCED[kind](text)
    found = answered(tokenizer_of("smollm2"), schema)
    assert found == expected
    if text.isascii():
        assert answered(tokenizer_of("tiny"), schema) == found
        return
    with pytest.raises(InvalidInputError, match=r"no tokens to write .*é"):
        grammars_of(tokenizer_of("tiny")).processor(schema)


def rebuilt(**parts: Any) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer of the zoo with other parts."""
    backend = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize(
    "before", [[], [decoders.Fuse()], [decoders.ByteFallback(), decoders.Fuse()]]
)
def test_letters_for_bytes_are_known_behind_other_decoders(before: list[Any]) -> None:
    """Transformers 5.6 read SmolLM2 so, and "né" could not be written."""
    tokenizer = rebuilt(decoder=decoders.Sequence([*before, decoders.ByteLevel()]))
    assert answered(tokenizer, {"const": "né 東"}) == "né 東"


def test_a_normaliser_makes_nothing_else_of_it() -> None:
    changing = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer = rebuilt(normalizer=changing)
    assert answered(tokenizer, {"const": "Cafe\u0301"}) == "Cafe\u0301"


def test_what_no_token_can_go_on_with_is_said() -> None:
    """A mask is an end then, and the answer was taken for a whole one."""
    with pytest.raises(InvalidInputError, match="no tokens for what has to follow"):
        answered(tokenizer_of("tiny"), {"type": "string", "pattern": "^a\\u00e9$"})


def test_a_marker_of_documents_may_be_asked_for() -> None:
    template = PromptTemplate(chunk_start="<doc>", chunk_end="</doc>")
    engine = Engine(make_model(), make_tokenizer(), template=template)
    held = JsonGrammars(engine.model, engine.tokenizer).held({"const": "<doc>"}, {})
    assert engine.generate("what?", ["one"], max_new_tokens=20, **held).text == '"<doc>"'


@pytest.mark.parametrize(
    "format_", ["path", "password", "binary", "uuid4", "json-string", "base64url", "idn-email"]
)
def test_a_format_that_is_not_known_is_a_hint(format_: str) -> None:
    known = {"type": "string", "format": format_, "enum": ["a"]}
    alike = {"anyOf": [known, {"allOf": [known]}]}
    schema = {"type": "object", "properties": {"a": alike}, "required": ["a"]}
    assert answered(make_tokenizer(), schema) == {"a": "a"}
    json_grammar({"x-guidance": {"coerce_one_of": True}, "oneOf": [{"minLength": 1}, {}]})
    for beside in ({"not": {}}, {"format": 5}, {"oneOf": [{"minLength": 1}, {"minLength": 2}]}):
        with pytest.raises(InvalidInputError, match="cannot be held to this schema"):
            json_grammar({"items": {**known, **beside}})


def test_what_is_forced_leaves_no_choice_and_goes_no_further() -> None:
    """A token that goes on behind it, such as ` ".`, was chosen for how it begins."""
    tokenizer = tokenizer_of("smollm2")
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=tokenizer.eos_token_id))
    schema = {"properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    processor = JsonGrammars(model, tokenizer).processor({"type": "object", **schema})
    ids, written, scores = torch.tensor([[1, 2]]), "", torch.zeros(1, len(tokenizer))
    while True:
        allowed = processor(ids, scores).isfinite().nonzero()[:, 1].tolist()
        if len(allowed) > 1:
            break
        written += tokenizer.decode(allowed)
        ids = torch.cat([ids, torch.tensor([allowed])], 1)
    assert written == '{"answer": "'
    assert len(allowed) > 10_000, "then the model says what it wants"


@pytest.mark.parametrize(
    "hint",
    [{"uniqueItems": True}, {"contains": {"type": "string"}}, {"not": {"type": "null"}}],
    ids=lambda one: next(iter(one)),
)
def test_what_no_grammar_holds_is_left_out_where_that_is_asked(hint: dict[str, Any]) -> None:
    schema = {"type": "array", "items": {"type": "string"}, **hint}
    with pytest.raises(InvalidInputError, match="cannot be held to this schema"):
        json_grammar(schema)
    assert json_grammar(schema, is_lenient=True)


def test_patterns_that_a_text_may_have_to_fit_together_are_few() -> None:
    """Fifteen took 25 seconds, in which nobody was answered, and each more four times as long."""
    parts = [{"type": "string", "pattern": f".*a.{{{size}}}b.*"} for size in range(5, 20)]
    with pytest.raises(InvalidInputError, match="15 patterns and formats and may have 8"):
        json_grammar({"properties": {"x": {"allOf": parts}}})
    with pytest.raises(InvalidInputError, match="characters and may have 262144"):
        json_grammar({"description": "x" * 300_000})
    assert json_grammar({"properties": {f"p{at}": one for at, one in enumerate(parts)}})
