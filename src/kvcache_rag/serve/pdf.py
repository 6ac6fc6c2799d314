"""The text of a PDF, by `pypdf`: all that reads one in this package."""

from __future__ import annotations

import io
import time
from typing import Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError

SECONDS: Final = 20.0
"""Within which the pages of a file have to be read; pages can be built to take hours."""


def pdf_text(content: bytes, *, most: int, seconds: float = SECONDS) -> str:
    """The text of all pages, an empty line between two of them.

    Args:
        content: Of the file.
        most: Bytes of text, as UTF-8.
        seconds: As `SECONDS`.

    Raises:
        MissingExtraError: If `pypdf` is not installed.
        InvalidInputError: If it is no PDF, is damaged or locked, has no text, or too much.
    """
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise MissingExtraError("pypdf", "pdf") from error
    until, size, pages = time.monotonic() + seconds, 0, list[str]()
    try:
        reader = PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise InvalidInputError("it is locked by a password; save it without one")
        for page in reader.pages:
            pages.append(page.extract_text().strip())
            size += len(pages[-1].encode(errors="replace"))
            if size > most or time.monotonic() > until:
                raise InvalidInputError(
                    f"only {len(pages)} of its {len(reader.pages)} pages could be read within "
                    f"{seconds:g} seconds and {most} bytes of text; give a part of it"
                )
    except InvalidInputError:
        raise
    except Exception as error:  # a damaged file fails in as many ways as there are bytes in it
        raise InvalidInputError(
            f"it is no PDF, or a damaged one ({type(error).__name__}); save it anew"
        ) from error
    text = "\n\n".join(page for page in pages if page)
    if not text:
        raise InvalidInputError(
            "there is no text on its pages, as on scanned ones; recognise it first, such as with "
            "ocrmypdf"
        )
    # Half of a character, which broken fonts yield, cannot be sent.
    return text.encode(errors="replace").decode()
