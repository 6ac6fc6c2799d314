"""A JSON schema as a grammar over a model's tokens, and as a logits processor of `generate()`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.forks import new_lock
from kvcache_rag.prompt.tokens import TextEncoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_KEPT: Final = 64  # compiled schemas
_PARTS, _LEVELS = (
    1000,
    200,
)  # of objects; compiled in a tenth of a second, ten times as many in fifteen
# As json.dumps writes, which is what models have read most; free white space would have no end.
_WRITING: Final[dict[str, Any]] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}


class JsonProcessor:
    """Rules out every token that cannot go on to a JSON text of the schema.

    One for each call of the model; several `generate()`s of it (rounds) each begin anew.
    """

    def __init__(self, matcher: Any) -> None:
        """Start every row from a copy of `matcher`."""
        self._start = matcher
        self._rows: list[Any] = []
        self._seen: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits `(rows, vocabulary)` with -inf for what is ruled out.

        Args:
            input_ids: `(rows, n)`, prompt and what has been generated.
            scores: `(rows, vocabulary)`.
        """
        import torch

        if self._goes_on(input_ids):
            for row, token in zip(self._rows, input_ids[:, -1].tolist(), strict=True):
                if not row.is_stopped():
                    row.consume_token(token)
        else:
            self._rows = [self._start.deep_copy() for _ in range(input_ids.shape[0])]
        self._seen = input_ids
        masks = [
            torch.frombuffer(bytearray(row.compute_logit_bias()), dtype=torch.uint8)
            for row in self._rows
        ]
        width = scores.shape[1]
        allowed = torch.zeros(scores.shape, dtype=torch.bool)
        for row, mask in enumerate(masks):
            allowed[row, : len(mask)] = mask[:width] > 0
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def _goes_on(self, input_ids: Tensor) -> bool:
        """Whether these ids are the last ones and one more token."""
        seen = self._seen
        return (
            seen is not None
            and seen.shape[0] == input_ids.shape[0]
            and seen.shape[1] + 1 == input_ids.shape[1]
            and bool((input_ids[:, :-1] == seen).all())
        )


class JsonGrammars:
    """JSON schemas as grammars over the tokens of one model; threads may share one.

    What is costly to make, the tokens' trie and compiled schemas, is made once.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Make nothing yet.

        Args:
            model: Its generation config says which tokens end a sequence.
            tokenizer: Of the model.
        """
        self._model, self._tokenizer = model, tokenizer
        self._tokens: Any = None
        self._matchers: dict[str, Any] = {}
        self._guard = new_lock()

    def held(self, schema: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `generate()`, with decoding held to a JSON schema.

        Raises:
            MissingExtraError: If llguidance is not installed.
            InvalidInputError: If schema, tokenizer or options do not allow it.
        """
        if int(options.get("num_beams") or 1) > 1:
            raise InvalidInputError("json_schema does not go with beam search; leave num_beams out")
        others = options.get("logits_processor") or ()
        return {**options, "logits_processor": [*others, self.processor(schema)]}

    def processor(self, schema: dict[str, Any]) -> JsonProcessor:
        """A logits processor that holds one call of `generate()` to a JSON schema.

        Raises:
            MissingExtraError: If llguidance is not installed.
            InvalidInputError: If schema or tokenizer cannot be used.
        """
        name = _checked(schema)
        with self._guard:
            if name not in self._matchers:
                text = json_grammar(schema)
                if self._tokens is None:
                    self._tokens = _tokens(self._model, self._tokenizer)
                matcher = _llguidance().LLMatcher(self._tokens, text, log_level=0)
                if matcher.is_error():
                    raise _unusable(matcher.get_error())
                if len(self._matchers) >= _KEPT:
                    self._matchers.pop(next(iter(self._matchers)))
                self._matchers[name] = matcher
            return JsonProcessor(self._matchers[name])


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of a JSON schema, as llguidance reads it.

    Raises:
        MissingExtraError: If llguidance is not installed.
        InvalidInputError: If the schema cannot be used.
    """
    matcher = _llguidance().LLMatcher
    _checked(schema)
    try:
        text: str = matcher.grammar_from_json_schema(json.dumps(closed(schema)), overrides=_WRITING)
    except (TypeError, ValueError) as error:
        raise _unusable(str(error)) from error
    failed, messages = matcher.validate_grammar_with_warnings(text)
    if failed:
        raise _unusable("; ".join(messages))
    return text


def json_instruction(schema: Any) -> str:
    """What the model is told behind the question.

    Raises:
        InvalidInputError: If it is no JSON schema.
    """
    _checked(schema)
    return f"\n\nAnswer with JSON that fits this schema: {json.dumps(schema, ensure_ascii=False)}"


def _checked(schema: Any) -> str:
    """A schema's text, by which it is known."""
    if not isinstance(schema, dict):
        raise InvalidInputError(f"json_schema must be a JSON schema, a dict, not {schema!r:.100}")
    _check_size(schema)
    try:
        return json.dumps(schema, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise _unusable(str(error)) from error


def _check_size(schema: Any) -> None:
    """Refuse a schema that would hold up everybody, or that functions here cannot go through."""
    parts, level = 0, [schema]
    for _ in range(_LEVELS):
        below: list[Any] = []
        for one in level:
            parts += isinstance(one, dict)
            below += one.values() if isinstance(one, dict) else one
            if parts > _PARTS:
                raise _unusable(f"it has more than {_PARTS} objects; ask for fewer fields at once")
        level = [one for one in below if isinstance(one, (dict, list, tuple))]
        if not level:
            return
    raise _unusable(f"it is nested in more than {_LEVELS} levels; make it flatter")


def closed(schema: Any) -> Any:
    """The schema, with objects that list their properties having no others.

    JSON Schema allows any others where nothing is said, and a model could go on with them for ever.
    """
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = dict(schema)
    for key in ("$defs", "definitions", "properties", "patternProperties"):
        if isinstance(inner.get(key), dict):
            inner[key] = {name: closed(one) for name, one in inner[key].items()}
    for key in ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties"):
        if key in inner:
            inner[key] = closed(inner[key])
    if isinstance(inner.get("properties"), dict) and not {"allOf", "patternProperties"} & {*inner}:
        inner.setdefault("additionalProperties", False)
    return inner


def _tokens(model: Any, tokenizer: Any) -> Any:
    stops = model.generation_config.eos_token_id
    if stops is None:
        stops = tokenizer.eos_token_id
    if stops is None:
        raise InvalidInputError(
            "structured output needs a model with an end-of-sequence token; set "
            "model.generation_config.eos_token_id"
        )
    ends = stops if isinstance(stops, list) else [stops]
    tokenizer = TextEncoder.of(tokenizer).tokenizer  # which the app does not switch meanwhile
    library = _llguidance()
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, eos_token=ends)
    except ValueError:  # a decoder that it does not know, or no fast tokenizer
        wrapped = library.TokenizerWrapper(_Pieces(tokenizer, ends))
        return library.LLTokenizer(wrapped, eos_token=ends)


class _Pieces:
    """What llguidance asks of a tokenizer, by what each token adds to a text."""

    def __init__(self, tokenizer: Any, ends: list[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = ends[0], tokenizer.bos_token_id
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *ends})
        anchor = self._ids("a")  # so that no space is lost at the beginning of a text
        before = self._text(anchor)
        self.tokens = [
            self._bytes(token, self._text([*anchor, token])[len(before) :])
            for token in range(len(tokenizer))
        ]
        self._named = {piece: token for token, piece in enumerate(self.tokens)}
        self._longest = max(map(len, self._named))

    def __call__(self, text: str) -> list[int]:
        """Ids that are exactly this text; a tokenizer may put a space before it."""
        left = text.encode()
        ids = self._ids(text)
        if b"".join(self.tokens[token] for token in ids) == left:
            return ids
        ids = []
        while left:
            lengths = range(min(len(left), self._longest), 0, -1)
            length = next((one for one in lengths if left[:one] in self._named), 0)
            if not length:
                break  # what the vocabulary cannot write is not forced
            ids.append(self._named[left[:length]])
            left = left[length:]
        return ids

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    def _bytes(self, token: int, text: str) -> bytes:
        # 0xff begins the name of a token that is no text; half a character is none either.
        if token in self.special_token_ids or not text or "\ufffd" in text:
            return b"\xff" + f"[{token}]".encode()
        return text.encode("utf-8", "surrogatepass")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("llguidance", "structured") from error
    return llguidance


def _unusable(reason: str) -> InvalidInputError:
    first = reason.strip().splitlines()[0] if reason.strip() else "unknown reason"
    return InvalidInputError(f"decoding cannot be held to this schema: {first}")
