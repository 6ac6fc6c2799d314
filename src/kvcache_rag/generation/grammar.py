"""A JSON schema as a grammar over a model's tokens, and as a logits processor of `generate()`."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.forks import new_lock
from kvcache_rag.prompt.tokens import TextEncoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

_KEPT: Final = 64  # compiled schemas
_PARTS, _LEVELS = (
    1000,
    200,
)  # of objects; compiled in a tenth of a second, ten times as many in fifteen
_LONGEST: Final = 1 << 18  # characters of a schema
# Texts that fit several patterns at once take four times as long to find for each further one:
# half a second for twelve, hours for twenty.
_PATTERNS: Final = 8
# As json.dumps writes, which is what models have read most; free white space would have no end.
_WRITING: Final[dict[str, Any]] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}
_NAMED: Final = ("$defs", "definitions", "properties", "patternProperties")  # schemas by name
_UNKNOWN_FORMAT: Final = "Unknown format: "
_NO_TEXT: Final = b"\xff"  # begins the name of a token that is no text
_PIECE: Final = 64  # bytes of a token that a text without a reading of its own is written with


class JsonProcessor:
    """A logits processor that rules out every token that cannot lead to JSON of the schema.

    Make one per call of the model; each `generate()` of the call (each round) begins anew.
    """

    def __init__(self, matcher: Any, pieces: _Pieces) -> None:
        """Start every row from a copy of `matcher`; `pieces` are the model's tokens."""
        self._start, self._pieces = matcher, pieces
        self._rows: list[Any] = []
        self._seen: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits `(rows, vocabulary)` with -inf for tokens that are ruled out.

        Args:
            input_ids: `(rows, n)`, prompt and generated tokens.
            scores: `(rows, vocabulary)`.

        Raises:
            InvalidInputError: If no token can follow, or the last one was ruled out.
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
        for row in self._rows:
            if row.is_error():  # what it allows then is an end
                raise _dead_end(row.get_error())
        width = scores.shape[1]
        allowed = torch.zeros(scores.shape, dtype=torch.bool)
        for row, mask in enumerate(masks):
            forced = self._forced(row)
            if forced is None:
                allowed[row, : len(mask)] = mask[:width] > 0
            else:
                allowed[row, forced] = True
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def _forced(self, row: int) -> int | None:
        """The token for what has to follow; None where the model has a choice.

        Other tokens would be allowed, too: those that go on behind it.  Chosen for how they begin,
        they would have the model say what it did not want to.
        """
        text = b"" if self._rows[row].is_stopped() else self._rows[row].compute_ff_bytes()
        return self._pieces.longest(text)

    def _goes_on(self, input_ids: Tensor) -> bool:
        """Whether these ids are the last ones and one more token."""
        seen = self._seen
        return (
            seen is not None
            and seen.shape[0] == input_ids.shape[0]
            and seen.shape[1] + 1 == input_ids.shape[1]
            and bool((input_ids[:, :-1] == seen).all())
        )


def is_held(options: Mapping[str, Any]) -> bool:
    """Whether options of `generate()` hold an answer to a schema."""
    return any(isinstance(one, JsonProcessor) for one in options.get("logits_processor") or ())


class JsonGrammars:
    """JSON schemas as grammars over the tokens of one model; threads may share one.

    The tokens' trie and compiled schemas, which are costly, are made once.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Make nothing yet.

        Args:
            model: Its generation config says which tokens end a sequence.
            tokenizer: The model's.
        """
        self._model, self._tokenizer = model, tokenizer
        self._tokens: tuple[_Pieces, Any] | None = None
        self._matchers: dict[str, Any] = {}
        self._guard = new_lock()

    def held(self, schema: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `generate()` that hold decoding to a JSON schema.

        Raises:
            MissingExtraError: If llguidance is not installed.
            InvalidInputError: If schema, tokenizer or options do not allow it.
        """
        if int(options.get("num_beams") or 1) > 1:
            raise InvalidInputError("json_schema does not go with beam search; leave num_beams out")
        others = options.get("logits_processor") or ()
        return {**options, "logits_processor": [*others, self.processor(schema)]}

    def processor(self, schema: dict[str, Any], *, is_lenient: bool = False) -> JsonProcessor:
        """A logits processor that holds one call of `generate()` to a JSON schema.

        Args:
            schema: The schema.
            is_lenient: Whether keywords that the grammar does not know are left out.

        Raises:
            MissingExtraError: If llguidance is not installed.
            InvalidInputError: If schema or tokenizer cannot be used.
        """
        name = f"{is_lenient} {_checked(schema)}"
        with self._guard:
            if self._tokens is None:
                _llguidance()
                self._tokens = _tokens(self._model, self._tokenizer)
            pieces, tokens = self._tokens
            if name not in self._matchers:
                text = json_grammar(schema, is_lenient=is_lenient)
                pieces.check(schema)
                matcher = _llguidance().LLMatcher(tokens, text, log_level=0)
                if matcher.is_error():
                    raise _unusable(matcher.get_error())
                if len(self._matchers) >= _KEPT:
                    self._matchers.pop(next(iter(self._matchers)))
                self._matchers[name] = matcher
            return JsonProcessor(self._matchers[name], pieces)


def json_grammar(schema: dict[str, Any], *, is_lenient: bool = False) -> str:
    """The grammar of a JSON schema, in llguidance's form.

    Args:
        schema: The schema.
        is_lenient: Whether keywords that the grammar does not know are left out.

    Raises:
        MissingExtraError: If llguidance is not installed.
        InvalidInputError: If the schema cannot be used.
    """
    _checked(schema)
    text, errors, _ = _grammar(schema, _WRITING)
    if errors and (is_lenient or errors[0].startswith(_UNKNOWN_FORMAT)):
        # A format is a hint.  So is much else for whoever is lenient.
        text, errors, warnings = _grammar(schema, {**_WRITING, "lenient": True})
        if not is_lenient:
            errors += [one for one in warnings if not one.startswith(_UNKNOWN_FORMAT)]
    if errors:
        raise _unusable("; ".join(errors))
    return text


def _grammar(
    schema: dict[str, Any], options: Mapping[str, Any]
) -> tuple[str, list[str], list[str]]:
    """A grammar, what is wrong with it, and what is doubtful."""
    matcher = _llguidance().LLMatcher
    try:
        text = matcher.grammar_from_json_schema(json.dumps(closed(schema)), overrides=options)
    except (TypeError, ValueError) as error:
        raise _unusable(str(error)) from error
    failed, messages = matcher.validate_grammar_with_warnings(text)
    return (text, messages, []) if failed else (text, [], messages)


def json_instruction(schema: Any) -> str:
    """The text about a schema that follows the question.

    Raises:
        InvalidInputError: If it is not a JSON schema.
    """
    _checked(schema)
    return f"\n\nAnswer with JSON that fits this schema: {json.dumps(schema, ensure_ascii=False)}"


def _checked(schema: Any) -> str:
    """A schema's text, by which it is known."""
    if not isinstance(schema, dict):
        raise InvalidInputError(f"json_schema must be a JSON schema, a dict, not {schema!r:.100}")
    _check_size(schema)
    try:
        text = json.dumps(schema, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise _unusable(str(error)) from error
    if len(text) > _LONGEST:
        raise _unusable(f"it has {len(text)} characters and may have {_LONGEST}; make it shorter")
    patterns = sum(text.count(f'"{name}": ') for name in ("pattern", "patternProperties", "format"))
    if patterns > _PATTERNS and ('"allOf": ' in text or '"$ref": ' in text):
        raise _unusable(
            f"it has {patterns} patterns and formats and may have {_PATTERNS} where allOf or $ref "
            "can ask for several at once; leave some out"
        )
    return text


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
    for key in _NAMED:
        if isinstance(inner.get(key), dict):
            inner[key] = {name: closed(one) for name, one in inner[key].items()}
    for key in ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties"):
        if key in inner:
            inner[key] = closed(inner[key])
    if isinstance(inner.get("properties"), dict) and not {"allOf", "patternProperties"} & {*inner}:
        inner.setdefault("additionalProperties", False)
    return inner


def _forced(schema: Any) -> Iterator[str]:
    """Texts that an answer may have to hold, as they stand in it: values, names, letters."""
    if isinstance(schema, list):
        for one in schema:
            yield from _forced(one)
    if not isinstance(schema, dict):
        return
    for value in (*_items(schema, "enum"), *([schema["const"]] if "const" in schema else ())):
        yield json.dumps(value, ensure_ascii=False)
    for name in (*_items(schema, "properties"), *_items(schema, "required")):
        yield f"{json.dumps(name, ensure_ascii=False)}: "
    for pattern in (schema.get("pattern"), *_items(schema, "patternProperties")):
        yield from (letter for letter in str(pattern) if not letter.isascii())
    for key, part in schema.items():
        if key in _NAMED:
            yield from _forced([part[name] for name in _items(schema, key)])
        elif key not in ("enum", "const", "default", "examples"):
            yield from _forced(part)


def _items(schema: dict[str, Any], key: str) -> list[Any] | dict[str, Any]:
    return part if isinstance(part := schema.get(key), (list, dict)) else []


def _tokens(model: Any, tokenizer: Any) -> tuple[_Pieces, Any]:
    stops = model.generation_config.eos_token_id
    if stops is None:
        stops = tokenizer.eos_token_id
    if stops is None:
        raise InvalidInputError(
            "structured output needs a model with an end-of-sequence token; set "
            "model.generation_config.eos_token_id"
        )
    ends = stops if isinstance(stops, list) else [stops]
    library = _llguidance()
    # Its encoder's copy, which the app does not switch meanwhile.
    pieces = _Pieces(TextEncoder.for_tokenizer(tokenizer), ends)
    return pieces, library.LLTokenizer(library.TokenizerWrapper(pieces), eos_token=ends)


class _Pieces:
    """What llguidance asks of a tokenizer: the bytes of each token, and how a text is written.

    It would read by the tokenizer alone, which makes a control token of a literal and other
    characters of some (composed ones), so that what has to be written could not go on.
    """

    def __init__(self, encoder: TextEncoder, ends: list[int]) -> None:
        self._tokenizer = tokenizer = encoder.tokenizer
        self.eos_token_id, self.bos_token_id = ends[0], tokenizer.bos_token_id
        self._special = {*tokenizer.all_special_ids, *ends}
        read: Callable[[str], list[int]]
        try:
            own = _read(tokenizer, ends)
        except ValueError:  # a decoder that it does not know, or no fast tokenizer
            read = self._ids
            anchor = self._ids("a")  # so that no space is lost at the beginning of a text
            before = self._text(anchor)
            self.tokens = [
                self._bytes(token, self._text([*anchor, token])[len(before) :])
                for token in range(len(tokenizer))
            ]
        else:
            read = own.tokenize_str
            self._special.update(filter(own.is_special_token, range(own.vocab_size)))
            self.tokens = [own.decode_bytes([token]) for token in range(own.vocab_size)]
        self.special_token_ids = sorted(self._special)
        self._readers = (read, encoder.encode_untrusted)
        self._named = {
            piece: token
            for token, piece in enumerate(self.tokens)
            if piece and token not in self._special and not piece.startswith(_NO_TEXT)
        }
        self._bytes_alone = {piece[0] for piece in self._named if len(piece) == 1}

    def check(self, schema: dict[str, Any]) -> None:
        """Refuse a schema with a text that no tokens are."""
        for text in _forced(schema):
            plain = text.encode(errors="replace")
            if not self._bytes_alone.issuperset(plain) and self._written(self(text)) != plain:
                named = text.removesuffix(": ")
                raise _unusable(f"the model has no tokens to write {named:.100} with")

    def __call__(self, text: str) -> list[int]:
        """Ids that are exactly this text, none of a control token; of what can be written of it."""
        plain = text.encode()
        for read in self._readers:
            with suppress(Exception):  # what an encoder refuses
                ids = read(text)
                if self._special.isdisjoint(ids) and self._written(ids) == plain:
                    return ids
        return self._spelt(plain)

    def _spelt(self, text: bytes) -> list[int]:
        """The fewest tokens for the longest beginning that there are any for."""
        best: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}  # tokens, the last one, its start
        for at in range(len(text)):
            if at not in best:
                continue
            count = best[at][0] + 1
            for end in range(at + 1, min(at + _PIECE, len(text)) + 1):
                token = self._named.get(text[at:end])
                if token is not None and (end not in best or count < best[end][0]):
                    best[end] = (count, token, at)
        ids, at = [], max(best)
        while at:
            _, token, at = best[at]
            ids.append(token)
        return ids[::-1]

    def longest(self, text: bytes) -> int | None:
        """The longest token that begins a text; None where there is none."""
        for end in range(min(len(text), _PIECE), 0, -1):
            if text[:end] in self._named:
                return self._named[text[:end]]
        return None

    def _written(self, ids: list[int]) -> bytes:
        return b"".join(self.tokens[token] for token in ids)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    def _bytes(self, token: int, text: str) -> bytes:
        # Half a character is no text either.
        if token in self._special or not text or "\ufffd" in text:
            return _NO_TEXT + f"[{token}]".encode()
        return text.encode("utf-8", "surrogatepass")


def _read(tokenizer: Any, ends: list[int]) -> Any:
    """What llguidance makes of a tokenizer, whose letters for bytes it knows alone only.

    Beside a `ByteFallback`, as transformers 5.6 writes the decoder of SmolLM2, it takes them for
    text.

    Raises:
        ValueError: If it cannot read this tokenizer.
    """
    from llguidance.hf import from_tokenizer
    from tokenizers import Tokenizer, decoders

    with suppress(AttributeError):  # no fast tokenizer
        parts = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
        if any(part["type"] == "ByteLevel" for part in parts.get("decoders", ())):
            own = copy.copy(tokenizer)
            own._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            own._tokenizer.decoder = decoders.ByteLevel()
            return from_tokenizer(own, eos_token=ends)
    return from_tokenizer(tokenizer, eos_token=ends)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("llguidance", "structured") from error
    return llguidance


def _unusable(reason: str) -> InvalidInputError:
    first = reason.strip().splitlines()[0] if reason.strip() else "unknown reason"
    return InvalidInputError(f"decoding cannot be held to this schema: {first}")


def _dead_end(reason: str) -> InvalidInputError:
    if reason.startswith("NoExtension"):  # its name for it
        reason = "the model has no tokens for what has to follow"
    return _unusable(reason)
