"""The errors that this package raises on purpose.

    KVCacheRagError
    ├── UnsupportedModelError     the model's cache cannot be captured or moved: layer and reason
    ├── ChunkNotFoundError        the store does not hold the key: a miss, never a failed question
    │   ├── CorruptChunkError     it held something else, which was put aside
    │   ├── UntrustedChunkError   it holds what the signing key did not sign, which is left alone
    │   └── UnreadableChunkError  it could not be asked, or what it holds may not be read
    ├── FingerprintMismatchError  a key belongs to another model, prefix or namespace
    ├── ContextTooLongError       a chunk or a prompt does not fit the context window
    ├── InvalidInputError         an argument cannot be used (also a ValueError)
    ├── RemoteServerError         a server that was asked is lost, too busy, or failed
    └── MissingExtraError         an optional dependency is missing: carries the install line

Each message is one sentence that says what was wrong and what to do about it.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from fractions import Fraction
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from typing_extensions import Self

__all__ = [
    "ChunkNotFoundError",
    "ContextTooLongError",
    "CorruptChunkError",
    "FingerprintMismatchError",
    "InvalidInputError",
    "KVCacheRagError",
    "MissingExtraError",
    "RemoteServerError",
    "UnreadableChunkError",
    "UnsupportedModelError",
    "UntrustedChunkError",
]

_Member = TypeVar("_Member")


class KVCacheRagError(Exception):
    """Root of every error that this package raises on purpose."""


class UnsupportedModelError(KVCacheRagError):
    """The model keeps its context in a form that cannot be captured or moved."""


def refuse(why: str) -> None:
    """Raise `UnsupportedModelError` if there is a reason."""
    if why:
        raise UnsupportedModelError(why)


class ChunkNotFoundError(KVCacheRagError):
    """The store does not hold this chunk."""


class CorruptChunkError(ChunkNotFoundError):
    """The stored bytes are not those of the requested chunk; they were put aside."""


class UntrustedChunkError(ChunkNotFoundError):
    """The stored file is not signed by the key of this store; it was left as it is."""


class UnreadableChunkError(ChunkNotFoundError):
    """The store could not be asked, or may not read what it holds."""


class FingerprintMismatchError(KVCacheRagError):
    """The key was made by another model, prefix, codec or namespace."""


class ContextTooLongError(KVCacheRagError):
    """There are more tokens than the model's context window holds."""


class InvalidInputError(KVCacheRagError, ValueError):
    """An argument cannot be used."""


class RemoteServerError(KVCacheRagError):
    """A server that was asked cannot be reached, is lost, has no room, or failed."""


class MissingExtraError(KVCacheRagError, ImportError):
    """An optional dependency is missing."""

    def __init__(self, package: str, extra: str, dist: str = "kvcache-rag") -> None:
        """Say which package is missing, and which extra of which distribution installs it."""
        super().__init__(f"{package} is not installed: pip install '{dist}[{extra}]'")
        self._named = package, extra, dist

    def __reduce__(self) -> tuple[Any, ...]:
        """Made again of what it names: workers send their errors."""
        return type(self), self._named


# ---------------------------------------------------------------------- what users hand in
_PLAIN = {
    "bool": "True or False",
    "int": "a whole number",
    "float": "a finite number",
    "str": "a text",
    "None": "None",
}


def check_settings(
    owner: Callable[..., Any], values: Mapping[str, Any], *, infinite: tuple[str, ...] = ()
) -> None:
    """Refuse settings that are not of the plain types that `owner` is annotated with.

    Numbers of other libraries are numbers.  Annotations that name any other type are not looked at.

    Args:
        owner: A function or a dataclass of a module whose annotations are strings.
        values: Settings by name; further names are ignored.
        infinite: Names of numbers that may be without end.

    Raises:
        InvalidInputError: If one is of another type, NaN, or infinite and may not be.
    """
    for name, kinds in _plain_settings(owner):
        if name in values and not any(_is(values[name], kind) for kind in kinds):
            if name in infinite and values[name] == math.inf:
                continue
            wanted = " or ".join(words for kind, words in _PLAIN.items() if kind in kinds)
            raise InvalidInputError(f"{name} must be {wanted}, not {_shown(values[name])}")


def check_list(name: str, values: Iterable[_Member] | None, of: str) -> list[_Member]:
    """Values as a list, which can be read more than once; empty for None.

    Args:
        name: Name of the argument, for the message.
        values: The argument.
        of: What it should contain, for the message.

    Raises:
        InvalidInputError: If it is one text, or not iterable.
    """
    if isinstance(values, str):
        raise InvalidInputError(f"{name} must be a list of {of}, not one text")
    try:
        return [] if values is None else list(values)
    except TypeError:
        raise InvalidInputError(f"{name} must be a list of {of}, not {_shown(values)}") from None


def check_name(kind: str, name: object) -> str:
    """Return a name if it is a text.

    Args:
        kind: What it names, for the message.
        name: The name.

    Raises:
        InvalidInputError: If it is something else, or holds half a surrogate pair, which no file,
            digest or answer can hold.
    """
    if not isinstance(name, str):
        raise InvalidInputError(f"the {kind} must be a text, not {_shown(name)}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(
            f"the {kind} {_shown(name)} holds a lone surrogate, no letter; write it in UTF-8"
        ) from None
    return name


def check_unicode(what: str, text: str) -> str:
    """Return a text if it is valid Unicode.

    Args:
        what: Name of the text, for the message.
        text: The text.

    Raises:
        InvalidInputError: If it holds half a surrogate pair, as some PDF readers produce.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(
            f"{what} is not valid Unicode (it holds a lone surrogate, no letter); clean it, for "
            'example by text.encode("utf-8", "replace").decode()'
        ) from None
    return text


def expanded(path: str | os.PathLike[str]) -> str:
    """A path as text, with a leading `~` or `~user` replaced by the home folder.

    A shell only does that for separate words: not after `--name=`, nor in a settings file.
    """
    return os.path.expanduser(os.fspath(path))


_UNITS: Final = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)(?:b|bytes?)?", re.IGNORECASE)


def byte_count(text: str) -> int:
    """Read a number of bytes as people write it: 10GB, 1.5 MiB, 4096.

    Raises:
        ValueError: If it is not one; its message is the rest of a sentence.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"must be a number of bytes such as 10GB, not {text!r}")
    power = _UNITS[found[2].lower()]
    if found[3]:
        power = 1024 ** list(_UNITS).index(found[2].lower())
    return int(Fraction(found[1]) * power)


@cache
def _plain_settings(owner: Callable[..., Any]) -> tuple[tuple[str, frozenset[str]], ...]:
    found: dict[str, frozenset[str]] = {}
    for part in reversed(getattr(owner, "__mro__", (owner,))):
        for name, annotation in getattr(part, "__annotations__", {}).items():
            kinds = frozenset(kind.strip() for kind in str(annotation).split("|"))
            if kinds <= _PLAIN.keys() and name != "return":
                found[name] = kinds
    return tuple(found.items())


def _is(value: object, kind: str) -> bool:
    if kind == "None":
        return value is None
    if kind in ("bool", "str"):
        return isinstance(value, bool if kind == "bool" else str)
    if isinstance(value, bool):
        return False
    if kind == "int":
        return isinstance(value, Integral)
    return isinstance(value, Real) and math.isfinite(value)


def _shown(value: object) -> str:
    is_short = value is None or isinstance(value, str | int | float | bytes)
    text = ascii(value) if is_short else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


# Below it "temperature" would be a slip of "template".
_ALIKE: Final = 0.75


def close_to(name: str, known: Collection[str]) -> str:
    """The known name that was probably meant; "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, [*known], 1, _ALIKE)), "")


def refuse_unknown(
    given: Iterable[str],
    known: Collection[str],
    what: str,
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Refuse arguments that would otherwise be silently ignored.

    Args:
        given: Names of the arguments.
        known: Names that exist.
        what: "argument of ...", for the sentence.
        elsewhere: For names used elsewhere, how to say the same here.

    Raises:
        InvalidInputError: Naming the first unknown one, and the one that was probably meant.
    """
    for name in given:
        if name not in known:
            close, said = close_to(name, known), (elsewhere or {}).get(name)
            hint = f"did you mean {close}?" if close else "leave it out"
            raise InvalidInputError(f"{name} is no {what}; {f'say it by {said}' if said else hint}")


def arguments_of(*takers: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of functions, methods or classes, as far as these declare them."""
    from inspect import Parameter, signature

    rest = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    listed = (one for taker in takers for one in signature(taker).parameters.values())
    return frozenset(one.name for one in listed if one.kind not in rest)


class NamedArguments:
    """A class whose constructor refuses unknown keywords and names the one that was meant.

    A subclass whose constructor takes any keyword must refuse unknown ones itself.
    """

    def __new__(cls, *given: Any, **options: Any) -> Self:
        """As every class is made; `__init__` gets the arguments.

        Raises:
            InvalidInputError: If one is unknown.
        """
        if options:
            kind: type = cls
            known = _arguments(kind)
            refuse_unknown(options, known or options, f"argument of {cls.__name__}")
        return super().__new__(cls)


@cache
def _arguments(kind: type) -> frozenset[str]:
    """Names that a constructor knows; none where it takes any."""
    from inspect import Parameter, signature

    fields = getattr(kind, "model_fields", None)  # of pydantic, which takes what it does not know
    if fields is not None:
        return frozenset(fields)
    listed = signature(kind.__init__).parameters.values()  # type: ignore[misc]  # of this very class
    is_open = any(one.kind is Parameter.VAR_KEYWORD for one in listed)
    return frozenset() if is_open else arguments_of(kind.__init__)  # type: ignore[misc]  # as above


def first_problem(problems: Iterable[Mapping[str, Any]]) -> InvalidInputError:
    """Turn pydantic's first problem into an error of one sentence, whatever the settings' source.

    Args:
        problems: `errors()` of its `ValidationError`.
    """
    first = next(iter(problems))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInputError):
        return cause
    where, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    said = said.replace("Input should be", "must be")
    return InvalidInputError(f"{where} cannot be used: {said}")
