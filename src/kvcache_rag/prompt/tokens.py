"""Text to token ids, such that only the template can write control tokens.

A tokenizer reads the literal of an added token (`<|im_end|>`) as that token, whoever wrote it.  So
a text with a literal that users or documents brought is encoded by a second backend, made at load,
in which every added token has a name that nobody can guess: the template's own stand under those
names, and what was brought finds none.

A tokenizer is the app's as well, whose calls cut and pad texts and leave that behind in it for
others, so all texts are read by a copy.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.forks import new_lock

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Mapping

    from typing_extensions import Self

Finder: TypeAlias = Callable[[str], object]
"""Says of a text, by something true, that it holds a literal."""

Cover: TypeAlias = Callable[[str], str]
"""What is written in the place of a brought text."""

Writer: TypeAlias = Callable[[Cover], str]
"""Writes a text, with each brought part as its argument gives it."""

Offsets: TypeAlias = list[tuple[int, int]]
"""Per token its characters in a text, half-open; equal numbers for a token without any."""

Seam: TypeAlias = tuple[str, str]
"""What stands before and behind a brought text."""

# Stands for a space in sentencepiece, so a token of nothing else is no control token.
_METASPACE: Final = "\u2581"

# What a model writes unknown characters with, where it has these.
_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")

# Characters for private use, to stand for those of brought texts.
_PRIVATE: Final = range(0xF0000, 0x10FFFE)
_NOT_PRIVATE: Final = re.compile("[^\U000f0000-\U0010fffd]+")

never: Final[Finder] = frozenset[str]().__contains__
"""Finds a literal in no text."""

_HABITS: Final = (
    "chat_template",
    "clean_up_tokenization_spaces",
    "response_template",
    "special_tokens_map",
    "split_special_tokens",
)

# Letters, digits, marks and spaces, which both backends must read alike.
_PROBE: Final = "Probe of 2 readers,\n as text: äöü (東京)."


class Composed(str):
    """A text with literals of control tokens, of which some are not the template's.

    An ordinary text for whoever shows it; `TextEncoder` alone looks at `control`.

    Attributes:
        control: Start, stop and id of each control token that the template wrote, in order.
    """

    control: tuple[tuple[int, int, int], ...]

    def __new__(cls, text: str, control: Iterable[tuple[int, int, int]] = ()) -> Self:
        """Mark the template's control tokens in `text`."""
        composed = super().__new__(cls, text)
        composed.control = tuple(control)
        return composed


class TextEncoder:
    """The one way from a text to its ids.  Safe to use from any thread.

    The tokenizer is duck-typed: a call that gives `input_ids`; `added_tokens_decoder`,
    `backend_tokenizer` and `is_fast` where it has them.

    Attributes:
        tokenizer: The copy that reads every text without a brought literal, writes chats and
            decodes; nobody else has it, and it is never switched.
        known: The encoders of the tokenizers that there are, and of their copies.
    """

    known: ClassVar[weakref.WeakKeyDictionary[Any, TextEncoder]] = weakref.WeakKeyDictionary()
    _of_copies: ClassVar[weakref.WeakKeyDictionary[Any, weakref.ref[TextEncoder]]] = (
        weakref.WeakKeyDictionary()
    )
    _lock: ClassVar[threading.Lock] = new_lock()

    def __init__(self, tokenizer: Any) -> None:
        """Copy the tokenizer as it is now, and its backend with added tokens under other names."""
        self._form, self._habits = _form(tokenizer), _habits(tokenizer)
        self.tokenizer = tokenizer = _copied(tokenizer)
        self._control = _control_tokens(tokenizer)
        self._literals = tuple(token.content for token in self._control.values())
        self._normalize = _normalizer(tokenizer, self._control.values())
        self._finders: dict[frozenset[Seam], Finder] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._separate = _Separate.from_backend(backend, self._control) if self._control else None
        _remember_no_words(backend)

    @classmethod
    def for_tokenizer(cls, tokenizer: Any) -> TextEncoder:
        """The encoder of a tokenizer, or of an encoder's copy.

        It is made once for as long as the tokenizer lives, and anew when that has been changed.

        Raises:
            InvalidInputError: If the tokenizer reads a text differently every time.
        """
        with cls._lock:
            own = cls._of_copies.get(tokenizer)
            known = cls.known.get(tokenizer) if own is None else own()
            is_right = own is not None or (
                known is not None
                and known.reads_as(tokenizer)
                and known._habits == _habits(tokenizer)
            )
            if known is None or not is_right:
                known = cls.known[tokenizer] = cls(tokenizer)
                if known.tokenizer is not tokenizer:
                    cls._of_copies[known.tokenizer] = weakref.ref(known)
            return known

    def reads_as(self, tokenizer: Any) -> bool:
        """Whether a tokenizer has this one's vocabulary, and does the same to a text before.

        How it writes chats does not count: an app may switch that for a call of its own.

        Raises:
            InvalidInputError: If the tokenizer reads a text differently every time.
        """
        return self._form == _form(tokenizer)

    def finder(self, *seams: Seam) -> Finder:
        """What tells whether a text holds a literal, or makes one with what stands around it."""
        key = frozenset(seams)
        if key not in self._finders:
            self._finders[key] = self._finder(key)
        return self._finders[key]

    def _finder(self, seams: Iterable[Seam]) -> Finder:
        if not self._literals:
            return never
        find = _search(self._literals, seams)
        normalize = self._normalize
        if normalize is None:
            return find
        # A literal may appear only when the tokenizer has normalised the text.
        again = _search([*filter(None, map(normalize, self._literals))], seams)
        return lambda text: find(text) or again(normalize(text))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any that the tokenizer adds by habit.

        Args:
            text: With its literals as control tokens, unless it is `Composed`.

        Raises:
            InvalidInputError: If it is not valid Unicode.
        """
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"the text is not valid Unicode: {error}") from error
        if isinstance(text, Composed):
            return self._as_text(text).encode(text)[0]
        read = self.tokenizer(text, add_special_tokens=False, verbose=False)
        ids: list[int] = read["input_ids"]
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets] | None:
        """Ids of a text and the characters of each; None if the tokenizer does not say."""
        if isinstance(text, Composed):
            return self._as_text(text).encode(text)
        if not getattr(self.tokenizer, "is_fast", False):
            return None
        plain = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return plain["input_ids"], plain["offset_mapping"]

    def encode_untrusted(self, text: str) -> list[int]:
        """Ids of a text that stands alone, all of it brought: a document, an answer.

        Raises:
            InvalidInputError: As for `encode` and `compose`.
        """
        is_text = self.finder()(text)
        return self.encode(self.compose(lambda cover: cover(text)) if is_text else text)

    def behind_control(self, text: str) -> str:
        """What of a text stands behind its last literal."""
        ends = (text.rfind(one) + len(one) for one in self._literals if one in text)
        return text[max(ends, default=0) :].strip()

    def compose(self, *ways: Writer) -> Composed:
        """Write a text of which parts were brought, and find the template's own control tokens.

        While it is written a second time, every brought character is covered by one that stands
        for nothing, so that any literal in it then is the template's.

        Args:
            ways: The first writes the text, and gives each brought part to its argument.  A chat
                template may look at what is said (and cut an answer behind `</think>`), and comes
                to another text if it is covered; another way that comes to the same text then says
                who wrote what.  If none does, the template sees nothing of what is said.

        Raises:
            InvalidInputError: If the backend cannot be copied, as a slow tokenizer's.
        """
        plain = ways[0](str)
        self._as_text(plain)
        for way in (*ways, ways[0]):
            covering = _Covering(plain)
            covered = way(covering)
            text = covering.uncovered(covered)
            if text == plain:
                break
        return Composed(text, self._own(covered, text))

    def _own(self, covered: str, text: str) -> Iterator[tuple[int, int, int]]:
        """The control tokens among what is not covered, as the tokenizer itself finds them."""
        for run in _NOT_PRIVATE.finditer(covered):
            if run.group().isspace():
                continue  # between two words that were brought
            ids, offsets = self.encode_with_offsets(run.group()) or ((), ())
            for id_, (start, stop) in zip(ids, offsets, strict=True):
                token = self._control.get(id_)
                if token is None:
                    continue
                # A token may take the spaces around it.
                literal = run.group()[start:stop]
                at = literal.find(token.content)
                if at < 0:
                    literal, at = literal.strip(), len(literal) - len(literal.lstrip())
                    if not self._is_normal(literal, token.content):
                        continue  # stands for characters that are not known
                else:
                    literal = token.content
                first = run.start() + start + at
                if not (token.single_word and _is_in_word(text, first, first + len(literal))):
                    yield first, first + len(literal), id_

    def _is_normal(self, text: str, content: str) -> bool:
        return self._normalize is not None and self._normalize(text) == self._normalize(content)

    def _as_text(self, text: str) -> _Separate:
        """The backend for texts with literals."""
        if self._separate is not None:
            return self._separate
        literal = next((one for one in self._literals if one in text), "a control token")
        raise InvalidInputError(
            f"a text holds {literal!r}, and this kind of tokenizer cannot read that as text; leave "
            "it out, use the fast tokenizer of the model, or, if every text can be trusted, "
            'PromptTemplate(special_tokens="allow")'
        )


class _Separate:
    """A backend in which control tokens have names that nobody can guess."""

    def __init__(
        self, backend: Any, names: Mapping[int, str], unknown: int | None, ids: Mapping[int, int]
    ) -> None:
        self._backend, self._names = backend, names
        _remember_no_words(backend)
        # Ids that no text may give; the unknown token stands for characters, too.
        self._forbidden = names.keys() - {unknown}
        self._ids = ids  # by those of `backend`, where these differ

    @classmethod
    def from_backend(cls, backend: Any, control: Mapping[int, Any]) -> _Separate | None:
        """A second backend; None if there can be none, or it would not read a text alike."""
        nonce = secrets.token_hex(16)
        names = {id_: f"\ue000{nonce}:{id_}\ue001" for id_ in control}
        for made in (_sharing, _renamed):
            with suppress(Exception):  # no backend of the tokenizers library, parts in Python
                separate = cls(*made(backend, control, names))
                if separate._is_right(backend, control):
                    return separate
        return None

    def _is_right(self, backend: Any, control: Mapping[int, Any]) -> bool:
        """Whether it reads an ordinary text alike, and no literal as its token."""
        plain = backend.encode(_PROBE, add_special_tokens=False).ids
        if self._raw(_PROBE) != plain or any(
            self._raw(name) != [id_] for id_, name in self._names.items()
        ):
            return False
        literals = (control[id_].content for id_ in self._forbidden)
        probes = (probe for text in literals for probe in (text, f"a{text}a {text}"))
        return not any(self._forbidden & {*self._raw(probe)} for probe in probes)

    def _raw(self, text: str) -> list[int]:
        return self._own_ids(self._backend.encode(text, add_special_tokens=False).ids)

    def _own_ids(self, ids: list[int]) -> list[int]:
        return [self._ids.get(id_, id_) for id_ in ids] if self._ids else ids

    def encode(self, text: Composed) -> tuple[list[int], Offsets]:
        """Ids of a text, with its own control tokens and no others, and the characters of each.

        Raises:
            InvalidInputError: If others came of it all the same.
        """
        parts, places, end = [], list[int](), 0
        for start, stop, id_ in text.control:
            if id_ not in self._names:
                continue
            parts += [text[end:start], self._names[id_]]
            # Where each character of the renamed text stands in `text`.
            places += [*range(end, start), start, *[stop] * (len(self._names[id_]) - 1)]
            end = stop
        encoding = self._backend.encode("".join([*parts, text[end:]]), add_special_tokens=False)
        places += range(end, len(text) + 1)
        ids = self._own_ids(encoding.ids)
        own = [id_ for *_, id_ in text.control if id_ in self._forbidden]
        if [id_ for id_ in ids if id_ in self._forbidden] != own:
            raise InvalidInputError(
                "a text holds a control token that this tokenizer does not tell from text; leave "
                "it out"
            )
        return ids, [(places[start], places[stop]) for start, stop in encoding.offsets]


class _Covering:
    """Covers texts, character by character, all but the spaces (templates trim them)."""

    def __init__(self, plain: str) -> None:
        used = set(plain)
        self._free = (code for code in _PRIVATE if chr(code) not in used)
        self._covers: dict[int, int] = {}

    def __call__(self, text: str) -> str:
        for letter in set(text):
            if not letter.isspace() and ord(letter) not in self._covers:
                cover = next(self._free, None)
                if cover is None:
                    raise InvalidInputError("a text has too many different characters; shorten it")
                self._covers[ord(letter)] = cover
        return text.translate(self._covers)

    def uncovered(self, text: str) -> str:
        """What a text that was covered in part is without covers."""
        return text.translate({cover: letter for letter, cover in self._covers.items()})


# ---------------------------------------------------------------------- a copy of a tokenizer
def _form(tokenizer: Any) -> tuple[Any, ...]:
    """What tells that a tokenizer reads otherwise than before, in some microseconds.

    Raises:
        InvalidInputError: If it reads a text differently every time.
    """
    backend = _backend(tokenizer)
    if backend is None:
        return (len(getattr(tokenizer, "added_tokens_decoder", None) or ()),)
    if getattr(backend.model, "dropout", None):
        raise InvalidInputError(
            f"the tokenizer leaves out merges at random (dropout={backend.model.dropout}), so that "
            "no text has ids of its own; set tokenizer.backend_tokenizer.model.dropout to None"
        )
    parts = map(_part, (backend.normalizer, backend.pre_tokenizer))
    return (*map(backend.get_vocab_size, (False, True)), *parts)


def _backend(tokenizer: Any) -> Any:
    """What reads for a tokenizer, of the tokenizers library; None for what is written in Python."""
    from tokenizers import Tokenizer  # a client of a server has none, and need not load it

    backend = getattr(tokenizer, "_tokenizer", None)
    return backend if isinstance(backend, Tokenizer) else None


def _habits(tokenizer: Any) -> tuple[str, ...]:
    """What else of a tokenizer its copy has: how chats and their ends are written."""
    backend = _backend(tokenizer)
    return (
        *(str(getattr(tokenizer, name, None)) for name in _HABITS),
        str(_part(getattr(backend, "post_processor", None))),
    )


def _part(part: Any) -> Any:
    try:
        return None if part is None else part.__getstate__()
    except Exception:  # written in Python
        return type(part)


def _copied(tokenizer: Any) -> Any:
    """A tokenizer that reads as this one does, and that calls of this one do not change."""
    backend = _backend(tokenizer)
    if backend is not None:
        own = copy.copy(tokenizer)
        for name, value in vars(own).items():
            if isinstance(value, (dict, list)):
                setattr(own, name, value.copy())
        own._tokenizer = _twin(backend)
        return own
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # holds what cannot be copied; who wrote it says whether it may be shared
        return tokenizer


def _twin(backend: Any) -> Any:
    """A backend around the same model, whose vocabulary is not read.

    Itself, if its added tokens have ids that none would have now: its model was exchanged.
    """
    twin = type(backend)(backend.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(backend, name)
        if part is not None:
            with suppress(Exception):  # written in Python: then it is shared
                part = copy.deepcopy(part)
            setattr(twin, name, part)
    added = sorted(backend.get_added_tokens_decoder().items())
    twin.add_tokens([token for _, token in added])
    twin.encode_special_tokens = backend.encode_special_tokens
    is_same = str(added) == str(sorted(twin.get_added_tokens_decoder().items()))
    return twin if is_same else backend


def _remember_no_words(backend: Any) -> None:
    """Read every word anew: one that a tenant's text had would be read twice as soon for others."""
    resize = getattr(getattr(backend, "model", None), "_resize_cache", None)
    if resize is not None:
        resize(0)


def _control_tokens(tokenizer: Any) -> dict[int, Any]:
    """The added tokens of a tokenizer by id, special or not, but for those of space alone."""
    return {
        int(id_): token
        for id_, token in (getattr(tokenizer, "added_tokens_decoder", None) or {}).items()
        if token.content.replace(_METASPACE, " ").strip()
    }


def _normalizer(tokenizer: Any, control: Iterable[Any]) -> Callable[[str], str] | None:
    """What the tokenizer does to a text before it looks for some of its added tokens, if so."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None or not any(token.normalized for token in control):
        return None

    def normalize(text: str) -> str:
        normal: str = normalizer.normalize_str(text.encode(errors="replace").decode())
        return normal

    return normalize


_Made: TypeAlias = "tuple[Any, Mapping[int, str], int | None, Mapping[int, int]]"


def _sharing(backend: Any, control: Mapping[int, Any], names: Mapping[int, str]) -> _Made:
    """A backend around the same model: its vocabulary is neither copied nor read.

    For byte pairs only: pieces of other models may be literals as a whole.
    """
    model = backend.model
    if type(model).__name__ != "BPE":
        raise TypeError("another kind of model")
    names = _without_bytes(names, control, model.byte_fallback)
    copy = type(backend)(model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(backend, part) is not None:
            setattr(copy, part, getattr(backend, part))
    texts: dict[int, str] = {}
    for id_, token in sorted(backend.get_added_tokens_decoder().items()):
        texts[id_] = names.get(id_, "") if id_ in control else token.content
        if texts[id_]:
            # A name is found as it is; which words it may stand in, `TextEncoder` has looked at.
            form = {} if id_ not in control else {"normalized": False, "single_word": False}
            copy.add_tokens([_added(token, texts[id_], **form)])
    ids = {copy.token_to_id(text): id_ for id_, text in texts.items() if text}
    unknown = None if model.unk_token is None else model.token_to_id(model.unk_token)
    return copy, names, unknown, ids


def _added(token: Any, content: str, **form: bool) -> Any:
    parts = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return type(token)(content, **{part: getattr(token, part) for part in parts} | form)


def _renamed(backend: Any, control: Mapping[int, Any], names: Mapping[int, str]) -> _Made:
    """A copy of a backend in whose vocabulary, too, control tokens have other names."""
    config = json.loads(backend.to_str())
    names = _without_bytes(names, control, bool(config["model"].get("byte_fallback")))
    unknown = _rename(config, {control[id_].content: names.get(id_) for id_ in control})
    return type(backend).from_str(json.dumps(config)), names, unknown, {}


def _without_bytes(
    names: Mapping[int, str], control: Mapping[int, Any], has_bytes: bool
) -> Mapping[int, str]:
    """Leave out the tokens that a model writes unknown characters with."""
    if not has_bytes:
        return names
    return {id_: name for id_, name in names.items() if not _BYTE.fullmatch(control[id_].content)}


def _rename(config: dict[str, Any], names: Mapping[str, str | None]) -> int | None:
    """Give added tokens other names in a backend's configuration; None for no added token.

    Returns:
        The id of the token for what is unknown, if there is one.
    """
    config["truncation"] = config["padding"] = None
    config["added_tokens"] = [
        token
        if token["content"] not in names
        # A name is found as it is; which words it may stand in, `TextEncoder` has looked at.
        else {**token, "content": name, "normalized": False, "single_word": False}
        for token in config["added_tokens"]
        if (name := names.get(token["content"], "")) is not None
    ]
    renamed = {old: new for old, new in names.items() if new is not None}
    model = config["model"]
    vocabulary, unknown = model["vocab"], model.get("unk_token")
    if isinstance(vocabulary, list):  # pieces with their scores, the id is the place
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocabulary]
        number: int | None = model.get("unk_id")
        return number
    if "merges" in model:
        pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"])
        model["merges"] = [
            (first, second)
            for first, second in pairs
            if not renamed.keys() & {first, second, first + second}
        ]
    model["vocab"] = {renamed.get(piece, piece): id_ for piece, id_ in vocabulary.items()}
    if unknown is not None:
        model["unk_token"] = renamed.get(unknown, unknown)
    return vocabulary.get(unknown) if unknown is not None else None


def _search(literals: Iterable[str], seams: Iterable[Seam]) -> Finder:
    """Search for literals, and for parts of them that the text around completes.

    Spaces at either end may be trimmed before the seam comes about.
    """
    literals = list(literals)
    patterns = [_any_of(literals)]
    for before, behind in seams:
        ends = {text[cut:] for text, cut in _cuts(literals) if before.endswith(text[:cut])}
        starts = {text[:cut] for text, cut in _cuts(literals) if behind.startswith(text[cut:])}
        middles = {end[:cut] for end, cut in _cuts(ends) if cut and behind.startswith(end[cut:])}
        patterns += [rf"\A\s*{_any_of(ends)}"] if ends else []
        patterns += [rf"{_any_of(starts)}\s*\Z"] if starts else []
        patterns += [rf"\A\s*{_any_of(middles)}\s*\Z"] if middles else []
    return re.compile("|".join(patterns)).search


def _cuts(texts: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Each text with each place between two of its characters."""
    return ((text, cut) for text in texts for cut in range(1, len(text)))


def _any_of(texts: Iterable[str]) -> str:
    """A pattern that reads each common beginning once: there may be thousands of texts."""
    by_first: dict[str, list[str]] = {}
    texts = set(texts)
    for text in sorted(texts - {""}):
        by_first.setdefault(text[0], []).append(text)
    branches = []
    for group in by_first.values():
        # In sorted texts, what the first and the last have in common all have.
        first, last = group[0], group[-1]
        size = next((i for i, letter in enumerate(first) if last[i] != letter), len(first))
        rest = _any_of(text[size:] for text in group) if len(group) > 1 else ""
        branches.append(re.escape(first[:size]) + rest)
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}"


def _is_in_word(text: str, start: int, stop: int) -> bool:
    return bool(re.search(r"\w\Z", text[:start][-1:]) or re.match(r"\w", text[stop : stop + 1]))
