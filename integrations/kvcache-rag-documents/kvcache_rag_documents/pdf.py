"""PDF: the text of pages, and what was filled in or typed on them."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag_documents.html import raised
from kvcache_rag_documents.text import FileText, cleaned, counted, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# A page takes hundredths of a second; one of forms within forms takes what pypdf gives it at most.
PDF_SECONDS: Final = 30.0  # and as many for each megabyte


def pdf(data: bytes) -> FileText:
    """All pages, a blank line between two.

    Raises:
        InvalidInputError: If it is encrypted, takes far longer than files of its size do, or makes
            far more text.
        Exception: Whatever pypdf meets in a damaged file.
    """
    texts: list[str] = []
    pictures = letters = 0
    with silent("pypdf"):
        for page in _pages(data):
            pictures += _pictures(page)
            texts.append(_page_text(page))
            letters += len(texts[-1])
            if letters > _LETTERS:
                raise InvalidInputError(f"it makes more than {_LETTERS:,} letters; print it anew")
    return FileText(cleaned("\n\n".join(texts)).strip(), counted(pictures, "picture"))


_LETTERS: Final = 20_000_000


def _page_text(page: Any) -> str:
    text = _with_small_figures(page).strip()
    return "\n".join([*([text] if text else []), *_within(_filled_in(page), _LETTERS)])


def _within(texts: Iterator[str], letters: int) -> Iterator[str]:
    for text in texts:
        yield text
        letters -= len(text)
        if letters < 0:
            return


def _with_small_figures(page: Any) -> str:
    """A page's text, with figures that are raised or lowered as small letters: 10³ is not 103.

    What is smaller than what stands before it in its line, and a bit higher or lower, is raised or
    lowered; of a fraction the lower part stands behind the upper one.
    """
    pieces: list[tuple[str, float, float]] = []

    def note(text: str, outer: Any, inner: Any, _: Any, size: float) -> None:
        pieces.append((text, inner[5] * outer[3] + outer[5], abs(size * outer[3] * inner[3])))

    whole: str = page.extract_text(visitor_text=note)
    if "".join(text for text, _, _ in pieces) != whole:
        return whole
    found: list[str] = []
    small: list[tuple[str, float]] = []
    line: tuple[float, float] | None = None
    for text, height, size in pieces:
        rise = (height - line[0]) / line[1] if line and line[1] else 0.0
        if line and size < _SMALL * line[1] and _LEAST < abs(rise) < _MOST:
            small.append((text, rise))
        elif small and not text.strip(" "):
            small.append((text, small[-1][1]))
        else:
            found += _small_letters(small)
            small, line = [], (height, size) if text.strip() else line
            found.append(text)
        if "\n" in text:
            line = None
    return "".join([*found, *_small_letters(small)])


def _small_letters(pieces: Sequence[tuple[str, float]]) -> list[str]:
    """Pieces that stand together; those of a fraction, or with other letters, as they are."""
    rises = [rise > 0 for text, rise in pieces if text.strip()]
    letters = [raised(text.strip(), is_low=rise < 0) for text, rise in pieces if text.strip()]
    if None in letters or rises != sorted(rises):
        return [text for text, _ in pieces]
    small = iter(letters)
    return [
        text.replace(text.strip(), next(small) or "") if text.strip() else text
        for text, _ in pieces
    ]


# Of the line's size: what is small, and how far up or down it is.
_SMALL: Final = 0.9
_LEAST, _MOST = 0.05, 0.8


def _filled_in(page: Any) -> Iterator[str]:
    """What was written on a page; fields as `name: value`, by the name that a person sees."""
    for reference in page.get("/Annots") or ():
        annotation = reference.get_object()
        if int(annotation.get("/F", 0)) & _HIDDEN:
            continue
        if annotation.get("/Subtype") == "/FreeText" and annotation.get("/Contents"):
            yield _shown(annotation["/Contents"])
        if annotation.get("/Subtype") != "/Widget":
            continue
        kind, flags = _inherited(annotation, "/FT"), int(_inherited(annotation, "/Ff") or 0)
        value = _inherited(annotation, "/V")
        if kind == "/Btn":
            # A box or one of several buttons: it shows its own state, not the field's.
            state = annotation.get("/AS", value)
            if flags & _PUSHED or state in (None, "/Off"):
                continue
            shown = str(state).lstrip("/")
        elif kind in ("/Tx", "/Ch") and not (kind == "/Tx" and flags & _PASSWORD):
            several = value if isinstance(value, list) else [value]
            shown = ", ".join(_shown(one) for one in several if one is not None)
        else:
            continue
        if shown.strip():
            name = _inherited(annotation, "/TU") or _full_name(annotation)
            yield f"{name}: {shown}" if name else shown


# Flags of annotations and fields, by ISO 32000-1, tables 165, 226 and 228.
_HIDDEN: Final = 0b100010  # hidden, or not to be viewed
_PUSHED: Final = 1 << 16
_PASSWORD: Final = 1 << 13


def _shown(value: Any) -> str:
    """A value as text; of long ones a stream holds it."""
    value = value.get_object()
    data = getattr(value, "get_data", None)
    return data().decode(errors="replace") if data else str(value)


def _inherited(field_: Any, key: str) -> Any:
    """An entry of a field, or of those above it."""
    for _ in range(_FIELD_LEVELS):
        if key in field_:
            return field_[key]
        if "/Parent" not in field_:
            break
        field_ = field_["/Parent"].get_object()
    return None


_FIELD_LEVELS: Final = 32


def _full_name(field_: Any) -> str:
    names = []
    for _ in range(_FIELD_LEVELS):
        if "/T" in field_:
            names.append(str(field_["/T"]))
        if "/Parent" not in field_:
            break
        field_ = field_["/Parent"].get_object()
    return ".".join(reversed(names))


def _pictures(page: Any) -> int:
    """How many pictures a page has, none of them looked at."""
    resources = page.get("/Resources")
    shown = resources.get_object().get("/XObject") if resources is not None else None
    if shown is None:
        return 0
    kinds = (one.get_object().get("/Subtype") for one in shown.get_object().values())
    return sum(kind == "/Image" for kind in kinds)


def _pages(data: bytes) -> Iterator[Any]:
    from pypdf import PasswordType, PdfReader

    end = time.monotonic() + PDF_SECONDS * (1 + len(data) / 1e6)
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
        yield pages[number]
