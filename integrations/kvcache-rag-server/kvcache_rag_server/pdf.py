"""The text of a PDF that a browser sends: within limits, since pages can be built to take hours."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.integration.extraction import pdf_pages, whole_characters

SECONDS: Final = 20.0
"""Within which the pages of a file have to be read."""


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
    if find_spec("pypdf") is None:
        raise MissingExtraError("pypdf", "documents")
    until, size, pages = time.monotonic() + seconds, 0, list[str]()
    try:
        for page in pdf_pages(content):
            pages.append(page)
            size += len(page.encode(errors="replace"))
            if size > most or time.monotonic() > until:
                raise InvalidInputError(
                    f"only the first {len(pages)} of its pages could be read within {seconds:g} "
                    f"seconds and {most} bytes of text; give a part of it"
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
    return whole_characters(text)
