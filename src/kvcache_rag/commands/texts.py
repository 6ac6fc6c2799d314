"""Text files of a folder, cut by tokens: enough to count by, without a framework."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

EXTENSIONS: Final = (".md", ".txt")


def read_texts(folder: str) -> dict[str, str]:
    """The text files under a folder by their path, without hidden and empty ones.

    Raises:
        InvalidInputError: If there is none, or one is not UTF-8 text.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InvalidInputError(f"there is no folder {folder}")
    found = {
        path.relative_to(root).as_posix(): _read(path)
        for path in sorted(root.rglob("*"))
        if path.suffix.lower() in EXTENSIONS and path.is_file() and not _is_hidden(path, root)
    }
    texts = {name: text for name, text in found.items() if text.strip()}
    if not texts:
        raise InvalidInputError(f"there is no {' or '.join(EXTENSIONS)} file with text in {folder}")
    return texts


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8 text") from error


def cut(text: str, tokenizer: Any, size: int, overlap: int) -> Iterator[str]:
    """Pieces of at most `size` tokens, each sharing `overlap` with the one before it.

    A piece may have a token more or less when it is read alone: at its ends words are cut.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for start in range(0, max(1, len(ids) - overlap), size - overlap):
        piece = tokenizer.decode(ids[start : start + size])
        if piece.strip():
            yield piece
