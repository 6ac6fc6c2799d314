"""Files that a command writes at its end: whether it could is said at its beginning."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path


def check_file(path: Path) -> None:
    """Say before hours of work whether a file could be written.

    Raises:
        InvalidInputError: If it is a folder, or its folder does not exist or takes no files.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise InvalidInputError(f"{path} cannot be a file; name one in a folder there is")
    try:
        with tempfile.TemporaryFile(dir=folder):  # permissions alone do not say it
            pass
    except OSError as error:
        raise InvalidInputError(
            f"{path} cannot be written ({error.strerror}); name a file in another folder"
        ) from error
