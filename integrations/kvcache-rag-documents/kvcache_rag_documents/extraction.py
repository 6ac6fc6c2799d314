"""The files of folders: which can be read, their texts, and what was left out and why."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError, expanded
from kvcache_rag.progress import plain
from kvcache_rag_documents import html, pdf, text, word

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from kvcache_rag_documents.text import FileText

_NO_TEXT: Final = "there is no text in it"
_SCANNED: Final = "there is no text in it; pages that were scanned need OCR first"
_LINKED: Final = "it is a link to a folder, which is not followed; put its files here"
_DANGLING: Final = "it is a link to nothing"
_SPECIAL: Final = "it is neither a file nor a folder"
_NAMED_OTHERWISE: Final = "its name is not UTF-8; rename it"

_SHOWN: Final = 20  # files left out that are named
_FEW: Final = 5  # of kinds that are never read


@dataclass(frozen=True)
class LeftOut:
    """A file, or something in place of one, that gave no text.

    Attributes:
        name: Its path below the folder.
        reason: Why, for people.
        is_read: Whether it surely has no text, so that earlier text need not be kept.
    """

    name: str
    reason: str
    is_read: bool = False


@dataclass(frozen=True)
class FolderTexts:
    """The texts of a folder's files.

    Attributes:
        files: Files with text, by their path below the folder.
        left_out: Files without text.
    """

    files: dict[str, FileText]
    left_out: tuple[LeftOut, ...]

    @property
    def texts(self) -> dict[str, str]:
        """The texts of the files, by path."""
        return {name: file.text for name, file in self.files.items()}


def suffixes() -> tuple[str, ...]:
    """Suffixes of the files that can be read, with the extra `documents`."""
    return tuple(sorted(_READERS))


def is_known_kind(name: str) -> bool:
    """Whether a file can be read, judging by its suffix."""
    return _kind(name) in suffixes()


def read_folder(folder: str, *, allow_empty: bool = False) -> FolderTexts:
    """Read every visible file under a folder; links to folders are not followed.

    Args:
        folder: The folder.
        allow_empty: Whether the folder may have no text.

    Raises:
        InvalidInputError: If there is no such folder, or no text in it.
        MissingExtraError: If a file needs a library that is not installed.
    """
    root = Path(expanded(folder))
    entries = list(_entries(root))
    check_readable(path for path, problem in entries if not problem)
    files: dict[str, FileText] = {}
    left_out: list[LeftOut] = []
    for path, problem in entries:
        name = path.relative_to(root).as_posix()
        try:
            found = _read_file(path, name, problem)
        except OSError as error:
            left_out.append(LeftOut(name, _unopened(error)))
        except InvalidInputError as error:
            left_out.append(LeftOut(name, str(error), is_read=problem == _LINKED))
        else:
            if found.text.strip():
                files[name] = found
            else:
                left_out.append(LeftOut(name, _why_empty(name, found), is_read=True))
    if not files and not allow_empty:
        kinds = ", ".join(suffixes())
        why = "".join(f"; {plain(one.name)}: {one.reason}" for one in left_out[:1])
        raise InvalidInputError(f"there is no file with text ({kinds}) in {folder}{why}")
    return FolderTexts(files, tuple(left_out))


def _why_empty(name: str, file: FileText) -> str:
    if _kind(name) == ".pdf":
        return _SCANNED
    return f"{_NO_TEXT}, only {' and '.join(file.without)}" if file.without else _NO_TEXT


def _read_file(path: Path, name: str, problem: str) -> FileText:
    if problem:
        raise InvalidInputError(problem)
    if not is_known_kind(name):
        raise InvalidInputError(_why_unknown())
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(_NAMED_OTHERWISE) from None
    return read_file(name, path.read_bytes())


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


def without_lines(files: Mapping[str, FileText]) -> Iterator[str]:
    """Lines for people on what the texts of files leave out."""
    found = [(name, file.without) for name, file in files.items() if file.without]
    if found:
        yield f"without what is no text in {len(found)} file{'s' * (len(found) != 1)}:"
    for name, without in found[:_SHOWN]:
        yield f"  {plain(name)}: {', '.join(without)}"
    if len(found) > _SHOWN:
        yield f"  and {len(found) - _SHOWN} more"


def left_out_lines(left_out: Sequence[LeftOut], kept: Collection[str] = ()) -> Iterator[str]:
    """Lines for people on which files of a folder were left out and why.

    Args:
        left_out: From `read_folder`.
        kept: Names of files whose earlier text is kept.
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
        for package, module in reader.needs if reader else ():
            if find_spec(module) is None:
                raise MissingExtraError(f"{package}, which reads {path.name},", "documents")


def extract_text(name: str, data: bytes) -> str:
    """The text of a file, or ""; arguments and errors as for `read_file`."""
    return read_file(name, data).text


def read_file(name: str, data: bytes) -> FileText:
    """Read the text of a file.

    Args:
        name: Name of the file; its suffix gives the kind.
        data: Its content.

    Raises:
        InvalidInputError: If it cannot be read; gives the reason without the name.
        MissingExtraError: If a library is missing.
    """
    suffix = _kind(name)
    if suffix not in _READERS:
        raise InvalidInputError(_why_unknown())
    check_readable([Path(name)])
    try:
        found = _READERS[suffix].read(data)
    except InvalidInputError:
        raise
    except RecursionError as error:
        raise InvalidInputError("it is nested too deep; save it as text") from error
    except Exception as error:  # damaged files raise whatever a library meets
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise InvalidInputError(f"it cannot be read as {suffix} ({reason})") from error
    return replace(found, digest=sha256(data).hexdigest())


def _kind(name: str) -> str:
    return PurePath(name).suffix.lower()


@dataclass(frozen=True)
class Reader:
    """Reads one kind of file.

    Attributes:
        read: What a file's bytes say.
        says: What is read of such a file, and what is not, for people.
        needs: Libraries, by their names in registries and in Python.
    """

    read: Callable[[bytes], FileText]
    says: str
    needs: tuple[tuple[str, str], ...] = ()


_HTML: Final = Reader(
    html.html,
    "as a browser lays it out, its menus too: rows of tables in a line, numbers of lists, `10³` "
    "where a 3 is raised, `~~struck~~`, ☑ and ☐, formulas of MathML in a line; not what its "
    "attributes hide (`hidden`, `display: none`, a closed `<dialog>`), but what only style sheets "
    "hide",
    (("justhtml", "justhtml"),),
)
_READERS: Final = {
    ".docx": Reader(
        word.word,
        "with all changes accepted, text boxes, footnotes and endnotes, formulas in a line; not "
        "headers, footers, comments, hidden text, and the numbers of lists",
        (("mammoth", "mammoth"), *_HTML.needs),
    ),
    ".htm": _HTML,
    ".html": _HTML,
    ".md": Reader(
        text.markdown,
        "as it is (UTF-8); of front matter the title becomes a heading, sentences stay, and the "
        "rest becomes metadata",
    ),
    ".pdf": Reader(
        pdf.pdf,
        "the text of its pages, `10³` where a 3 is raised, what is filled in in forms (`name: "
        "value`) and notes that were typed on them; not formulas, and pages that were scanned need "
        "OCR first",
        (("pypdf", "pypdf"),),
    ),
    ".txt": Reader(text.plain, "as it is (UTF-8), without control characters"),
}

FOLDER: Final = f"folder with {', '.join(suffixes())} files"
"""How commands say what a folder of texts may hold."""


def kinds_table() -> Iterator[str]:
    """What is read of each kind of file, as a table in Markdown."""
    yield "| files | what is read | by |"
    yield "|---|---|---|"
    readers = dict.fromkeys(_READERS.values())
    for reader in readers:
        names = ", ".join(f"`{name}`" for name, one in _READERS.items() if one is reader)
        by = ", ".join(package for package, _ in reader.needs)
        yield f"| {names} | {reader.says} | {by} |"
