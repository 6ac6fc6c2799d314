"""Text and Markdown, and what all kinds of files share."""

from __future__ import annotations

import logging
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class FileText:
    """The text of a file.

    Attributes:
        text: Text as shown.
        without: For people, what the file has that is not in the text: "2 pictures".
        metadata: What the file says about itself, by name.
        digest: SHA-256 of the file, in hexadecimal digits; "" if not known.
    """

    text: str
    without: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""


def counted(count: int, name: str) -> tuple[str, ...]:
    """For `FileText.without`."""
    return (f"{count} {name}{'s' * (count != 1)}",) if count else ()


_CONTROLS: Final = {
    **dict.fromkeys((*range(0x20), *range(0x7F, 0xA0), 0xAD)),  # with the soft hyphen
    **{ord(letter): letter for letter in "\t\n"},
    **dict.fromkeys(map(ord, "\r\v\f\x85"), "\n"),
    **dict.fromkeys(range(0x1C, 0x20), " "),
}


def cleaned(text: str) -> str:
    """Without control characters, that nobody sees; halves of surrogate pairs become "?"."""
    return text.replace("\r\n", "\n").encode(errors="replace").decode().translate(_CONTROLS)


def plain(data: bytes) -> FileText:
    """Text in UTF-8."""
    try:
        return FileText(cleaned(data.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        raise InvalidInputError("it is not UTF-8 text; save it as UTF-8") from error


@contextmanager
def silent(name: str) -> Iterator[None]:
    """Keep a library from writing about each small fault of a file."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# ---------------------------------------------------------------------- Markdown
_FRONT_MATTER: Final = re.compile(
    r"---[ \t]*\n((?:[^\S\n]*\S[^\n]*\n)+?)(?:---|\.\.\.)[ \t]*(?:\n|\Z)"
)
_COMMENT: Final = re.compile(r"^[ \t]*#[ \t]?(.*)$", re.MULTILINE)
# PyYAML takes the square of both.
_FRONT_MATTER_BYTES: Final = 20_000
_NESTED: Final = re.compile(r"[\[{]|- |\? ")
_NESTED_MOST: Final = 200


def markdown(data: bytes) -> FileText:
    """As it is; front matter is a title, sentences that stay, and metadata.

    Front matter is one block of lines, none of them blank, that is a YAML mapping; what only looks
    like it stays text.
    """
    whole = plain(data).text
    found = _FRONT_MATTER.match(whole)
    fields = _yaml_mapping(found[1]) if found else None
    if found is None or fields is None:
        return FileText(whole)
    body = whole[found.end() :].lstrip("\n")
    title = _listed(fields["title"]) if "title" in fields else ""
    heading = [f"# {title}"] if title and not body.startswith("# ") else []
    said = [value for name, value in fields.items() if name != "title" and _is_sentence(value)]
    metadata = {
        name: _listed(value)
        for name, value in fields.items()
        if name == "title" or not _is_sentence(value)
    }
    if comments := _COMMENT.findall(found[1]):
        metadata.setdefault("comments", "\n".join(comments))
    text = "\n\n".join([*heading, *said, *([body] if body else [])])
    return FileText(text, metadata=metadata)


def _yaml_mapping(text: str) -> dict[str, Any] | None:
    """A YAML mapping; None if it is none."""
    if len(text) > _FRONT_MATTER_BYTES or len(_NESTED.findall(text)) > _NESTED_MOST:
        return None
    import yaml  # type: ignore[import-untyped]  # has no types

    try:
        # Of aliases a few lines can make a billion.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.BaseLoader)):
            return None
        loader = yaml.BaseLoader(text)  # which makes texts alone
        node = loader.get_single_node()
        found = loader.construct_document(node)
    except (yaml.YAMLError, RecursionError, TypeError):  # a name may be a list
        return None
    is_whole = isinstance(found, dict) and len(found) == len(node.value)  # no name is there twice
    return found if is_whole and all(isinstance(name, str) for name in found) else None


def _is_sentence(value: Any) -> bool:
    """Whether a value says something rather than labels: words that end as a sentence does."""
    if not isinstance(value, str):
        return False
    text = value.strip()
    return len(text.split()) > 2 and text.endswith(_ENDS)


_ENDS: Final = (".", "!", "?", "\u3002", "\uff01", "\uff1f")  # also those of Chinese and Japanese


def _listed(value: Any) -> str:
    """A value of YAML as one line."""
    if isinstance(value, list):
        return ", ".join(map(_listed, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_listed(one)}" for name, one in value.items())
    return " ".join(str(value).split())
