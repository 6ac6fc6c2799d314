"""The text of files: what documents say, whatever wrote them.

Text is read as it is, Markdown without its front matter; PDF, HTML and Word by the libraries of the
extra `documents`, which are imported when a file needs them.
"""

from __future__ import annotations

import io
import logging
import os
import re
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError, expanded
from kvcache_rag.progress import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

TEXT_SUFFIXES: Final = (".md", ".txt")

_NO_TEXT: Final = "there is no text in it"
_SCANNED: Final = "there is no text in it; pages that were scanned need OCR first"
_LINKED: Final = "it is a link to a folder, which is not followed; put its files here"
_DANGLING: Final = "it is a link to nothing"
_SPECIAL: Final = "it is neither a file nor a folder"
_NAMED_OTHERWISE: Final = "its name is not UTF-8; rename it"

_SHOWN: Final = 20  # files left out that are named
_FEW: Final = 5  # of kinds that are never read

# Files of Word are zips; with a password, or of before 2007, they are one of these.
_OLD_OFFICE: Final = b"\xd0\xcf\x11\xe0"

# A page takes hundredths of a second; one of forms within forms takes what pypdf gives it at most.
_PDF_SECONDS: Final = 30.0  # and as many for each megabyte

# Of unclosed tags and comments, for which the parser takes the square of their number: 3 seconds.
_HTML_LEVELS: Final = 5000
_TAG: Final = re.compile(rb"<(?:(/)[a-z]|!--|([a-z][a-z0-9]*))|-->", re.IGNORECASE)
_VOID: Final = frozenset(
    b"area base br col embed hr img input link meta param source track wbr".split()
)

# What tools keep about a note before it, in YAML.
_FRONT_MATTER: Final = re.compile(
    r"---[ \t]*\n(?P<fields>[\w-]+:.*?\n)(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL
)
_TITLE: Final = re.compile(r"^title:(?![ \t]*[|>])[ \t]*([\"']?)(.+?)\1[ \t]*$", re.MULTILINE)

_UNSEEN: Final = ("head", "noscript", "script", "style", "svg", "template")

_LINES: Final = ("dd", "dt", "li", "tr")
_BLOCKS: Final = (
    *("address", "article", "aside", "blockquote", "div", "dl", "fieldset", "figcaption", "figure"),
    *("footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol"),
    *("p", "pre", "section", "table", "ul"),
)


@dataclass(frozen=True)
class LeftOut:
    """A file, or what stands in place of one, that gave no text.

    Attributes:
        name: Its path below the folder.
        reason: Why, for people.
        is_read: Whether nothing can be in it, so that there is nothing to keep.
    """

    name: str
    reason: str
    is_read: bool = False


@dataclass(frozen=True)
class FolderTexts:
    """What the files of a folder say.

    Attributes:
        texts: By their path below the folder.
        left_out: Files without one.
    """

    texts: dict[str, str]
    left_out: tuple[LeftOut, ...]


def suffixes() -> tuple[str, ...]:
    """Of the files that can be read, with the extra `documents`."""
    return tuple(sorted((*TEXT_SUFFIXES, *_READERS)))


def is_known_kind(name: str) -> bool:
    """Whether a file of this name can be read, as far as its ending says."""
    return _kind(name) in suffixes()


def read_folder(folder: str, *, allow_empty: bool = False) -> FolderTexts:
    """Read every file under a folder that is not hidden; links to folders are not followed.

    Args:
        folder: Where they are.
        allow_empty: Whether there may be no text at all.

    Raises:
        InvalidInputError: If there is no such folder, or no text in it.
        MissingExtraError: If a file needs a library that is not installed.
    """
    root = Path(expanded(folder))
    entries = list(_entries(root))
    check_readable(path for path, problem in entries if not problem)
    texts: dict[str, str] = {}
    left_out: list[LeftOut] = []
    for path, problem in entries:
        name = path.relative_to(root).as_posix()
        try:
            text = _file_text(path, name, problem)
        except OSError as error:
            left_out.append(LeftOut(name, _unopened(error)))
        except InvalidInputError as error:
            left_out.append(LeftOut(name, str(error), is_read=problem == _LINKED))
        else:
            if text.strip():
                texts[name] = text
            else:
                reason = _SCANNED if _kind(name) == ".pdf" else _NO_TEXT
                left_out.append(LeftOut(name, reason, is_read=True))
    if not texts and not allow_empty:
        kinds = ", ".join(suffixes())
        why = "".join(f"; {plain(one.name)}: {one.reason}" for one in left_out[:1])
        raise InvalidInputError(f"there is no file with text ({kinds}) in {folder}{why}")
    return FolderTexts(texts, tuple(left_out))


def _file_text(path: Path, name: str, problem: str) -> str:
    if problem:
        raise InvalidInputError(problem)
    if not is_known_kind(name):
        return extract_text(name, b"")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(_NAMED_OTHERWISE) from None
    return extract_text(name, path.read_bytes())


def _unopened(error: OSError) -> str:
    return f"it cannot be opened ({error.strerror})"


def check_folder(root: Path) -> None:
    """Refuse what is no folder.

    Raises:
        InvalidInputError: If it is a file, or nothing.
    """
    if not root.is_dir():
        if root.exists():
            raise InvalidInputError(f"{root} is a file; name its folder, {root.parent}")
        raise InvalidInputError(f"there is no folder {root}")


def _entries(root: Path) -> list[tuple[Path, str]]:
    """What is under a folder in the order of its paths, without what is hidden.

    Each file has a "" beside it, and everything else, also a folder that is not looked into, why.

    Raises:
        InvalidInputError: If there is no such folder.
    """
    check_folder(root)
    found: list[tuple[Path, str]] = []

    def closed(error: OSError) -> None:
        if Path(error.filename) == root:
            raise InvalidInputError(f"the folder {root}: {_unopened(error)}") from error
        found.append((Path(error.filename), _unopened(error)))

    for place, folders, files in os.walk(root, onerror=closed):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [Path(place, name) for name in folders if Path(place, name).is_symlink()]
        found += [(path, _LINKED) for path in links]
        shown = [Path(place, name) for name in files if not name.startswith(".")]
        found += [(path, _problem(path)) for path in shown]
    return sorted(found)


def _problem(path: Path) -> str:
    """Why something that is no folder cannot be read; "" for a file, or a link to one."""
    if path.is_file():
        return ""
    return _SPECIAL if path.exists() else _DANGLING


def left_out_lines(left_out: Sequence[LeftOut], kept: Collection[str] = ()) -> Iterator[str]:
    """What of a folder was left out and why, for people.

    Args:
        left_out: Of `read_folder`.
        kept: Names of which something that was read before is kept.
    """
    if not left_out:
        return
    yield f"left out {len(left_out)} file{'s' * (len(left_out) != 1)}:"
    why_others = _why_unknown()
    others = [one for one in left_out if one.reason == why_others]
    named = [one for one in left_out if one.reason != why_others]
    for one in named[:_SHOWN]:
        before = "; what it said before is kept" if one.name in kept else ""
        yield f"  {plain(one.name)}: {plain(one.reason)}{before}"
    if len(named) > _SHOWN:
        yield f"  and {len(named) - _SHOWN} more that could not be read"
    if others:
        names = [plain(one.name) for one in others]
        if len(names) > _FEW:
            kinds = Counter(
                plain(PurePath(one.name).suffix) or "without an ending" for one in others
            )
            names = [f"{count} {kind}" for kind, count in kinds.most_common()]
        yield f"  {', '.join(names)}: {why_others}"


def _why_unknown() -> str:
    return f"only {', '.join(suffixes())} files are read"


def check_readable(paths: Iterable[Path]) -> None:
    """Say before anything is read whether a library is missing.

    Raises:
        MissingExtraError: Naming the library and the first file that needs it.
    """
    for path in paths:
        reader = _READERS.get(_kind(path.name))
        if reader is not None and find_spec(reader.module) is None:
            raise MissingExtraError(f"{reader.package}, which reads {path.name},", "documents")


def extract_text(name: str, data: bytes) -> str:
    """The text of a file; "" if there is none in it.

    Args:
        name: Of the file; its ending says what it is.
        data: What is in it.

    Raises:
        InvalidInputError: If it cannot be read; the reason, without the name.
        MissingExtraError: If a library is missing.
    """
    suffix = _kind(name)
    if suffix == ".md":
        return _markdown(data)
    if suffix in TEXT_SUFFIXES:
        return _text(data)
    if suffix not in _READERS:
        raise InvalidInputError(_why_unknown())
    check_readable([Path(name)])
    try:
        text = _READERS[suffix].read(data)
    except InvalidInputError:
        raise
    except Exception as error:  # damaged files raise whatever a library meets
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise InvalidInputError(f"it cannot be read as {suffix} ({reason})") from error
    return whole_characters(text)


def whole_characters(text: str) -> str:
    """Without halves of surrogate pairs and NULs, which fonts without a proper table give."""
    return text.encode(errors="replace").decode().replace("\0", "")


def _kind(name: str) -> str:
    return PurePath(name).suffix.lower()


# ---------------------------------------------------------------------- formats
def _text(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError("it is not UTF-8 text; save it as UTF-8") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as files opened for text are read


def _markdown(data: bytes) -> str:
    """With the title of its front matter for a heading, and without the rest of that.

    A note's own date, tags and author are answered in place of those that it is about.
    """
    text = _text(data)
    found = _FRONT_MATTER.match(text)
    if found is None:
        return text
    body = text[found.end() :].lstrip("\n")
    title = _TITLE.search(found["fields"])
    if title is None or body.startswith("# "):
        return body
    return f"# {title[2]}\n\n{body}"


@dataclass(frozen=True)
class _Reader:
    """Reads one kind of file.

    Attributes:
        package: The library's name in registries.
        module: Its name in Python.
        read: Text of a file's bytes.
    """

    package: str
    module: str
    read: Callable[[bytes], str]


def pdf_pages(data: bytes) -> Iterator[str]:
    """The text of each page of a PDF, read when it is asked for.

    Raises:
        InvalidInputError: If it is encrypted, or takes far longer than files of its size do.
        Exception: Whatever pypdf meets in a damaged file.
    """
    from pypdf import PasswordType, PdfReader

    end = time.monotonic() + _PDF_SECONDS * (1 + len(data) / 1e6)
    with _silent("pypdf"):
        document = PdfReader(io.BytesIO(data))
        # Many are encrypted without a password, only to forbid printing.
        if document.is_encrypted and document.decrypt("") == PasswordType.NOT_DECRYPTED:
            raise InvalidInputError("it is encrypted; save a copy without its password")
        pages = document.pages
    for number in range(len(pages)):
        if time.monotonic() > end:
            raise InvalidInputError(
                f"its first {number} pages took longer than files of its size do; print it to a "
                "new PDF"
            )
        with _silent("pypdf"):
            text = pages[number].extract_text().strip()
        yield text


def _pdf(data: bytes) -> str:
    return "\n\n".join(pdf_pages(data)).strip()


@contextmanager
def _silent(name: str) -> Iterator[None]:
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


def _html(data: bytes) -> str:
    """As a browser breaks lines: around blocks, and where it is told to."""
    from bs4 import BeautifulSoup
    from bs4.element import NavigableString

    if _levels(data) > _HTML_LEVELS:
        raise InvalidInputError(
            f"more than {_HTML_LEVELS} of its tags or comments are not closed; save it as text"
        )
    with _silent("bs4"):
        page = BeautifulSoup(data, "html.parser")
    for tag in page.find_all(_UNSEEN):
        tag.decompose()
    for text in page.find_all(string=True):
        # Comments and their like are of classes of their own.
        if type(text) is NavigableString and text.find_parent("pre") is None:
            text.replace_with(re.sub(r"\s+", " ", text))
    for cell in page.find_all(("td", "th")):
        if cell.find_next_sibling(("td", "th")) is not None:
            cell.append(" | ")
    for tag in page.find_all("br"):
        tag.replace_with("\n")
    for tag in page.find_all((*_LINES, *_BLOCKS)):
        tag.insert_before("\n")
        if tag.name in _BLOCKS:
            tag.insert_after("\n")
    # What is left of white space between words; `pre` indents by more.
    lines = (re.sub("^ (?! )", "", line).rstrip() for line in page.get_text().splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _levels(data: bytes) -> int:
    """How many tags and comments stand inside each other, as far as a look at them says."""
    level = deepest = 0
    for found in _TAG.finditer(data):
        if found[1] or found[0] == b"-->":
            level = max(0, level - 1)
        elif found[2] is None or found[2].lower() not in _VOID:
            level += 1
            deepest = max(deepest, level)
    return deepest


def _docx(data: bytes) -> str:
    if data.startswith(_OLD_OFFICE):
        raise InvalidInputError(
            "it has a password, or is of a Word before 2007; save it as .docx without one"
        )
    from docx import Document

    return "\n".join(_word_lines(Document(io.BytesIO(data)).element.body)).strip()


def _word_lines(element: Any) -> Iterator[str]:
    """Paragraphs and rows of tables, also within content controls, which python-docx skips."""
    for child in element.iterchildren():
        kind = _local_name(child)
        if kind == "p":
            yield _word_text(child)
        elif kind == "tr":
            cells = child.xpath("./w:tc | ./w:sdt/w:sdtContent/w:tc")
            yield " | ".join(" ".join(_word_lines(cell)).strip() for cell in cells)
        elif kind in ("tbl", "sdt", "sdtContent", "customXml"):
            yield from _word_lines(child)


# Pieces of runs in their order, once: a text box is written again for older programs.
_RUNS: Final = (
    ".//w:t[not({0})] | .//w:r/w:tab[not({0})] | .//w:r/w:br[not({0})] | .//w:r/w:cr[not({0})]"
).format("ancestor::*[local-name()='Fallback']")


def _word_text(paragraph: Any) -> str:
    """With what was inserted and is not accepted yet, without what was deleted."""
    spaces = {"tab": "\t", "br": "\n", "cr": "\n"}
    pieces = paragraph.xpath(_RUNS)
    return "".join(spaces.get(_local_name(piece), piece.text or "") for piece in pieces)


def _local_name(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]


_READERS: Final = {
    ".docx": _Reader("python-docx", "docx", _docx),
    ".htm": _Reader("beautifulsoup4", "bs4", _html),
    ".html": _Reader("beautifulsoup4", "bs4", _html),
    ".pdf": _Reader("pypdf", "pypdf", _pdf),
}
