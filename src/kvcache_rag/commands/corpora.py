"""Where `build` and `plan` take texts from: text files cut by tokens, and Chroma collections."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.corpus.texts import Item
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.integration.extraction import TEXT_SUFFIXES, extract_text, visible_files
from kvcache_rag.prompt.tokens import TextEncoder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag.corpus.worker import BuildSettings


_PAGE: Final = 500  # rows held at a time


@dataclass(frozen=True)
class TextFiles:
    """The .md and .txt files of a folder, cut by tokens.

    Attributes:
        folder: Where they are.
        settings: Whose model's tokenizer counts the tokens.
        size: Tokens of a chunk.
        overlap: Tokens that neighbours share.
    """

    folder: str
    settings: BuildSettings
    size: int
    overlap: int

    def items(self) -> Iterator[Item]:
        """The pieces, file by file."""
        from kvcache_rag.models.pretrained import load_tokenizer, resolve

        texts = read_texts(self.folder)
        revision = self.settings.revision
        options = {"revision": revision} if revision else {}
        tokenizer = load_tokenizer(resolve(self.settings.model), options)
        for name, text in texts.items():
            for number, piece in enumerate(cut(text, tokenizer, self.size, self.overlap), start=1):
                yield Item(f"{name}, piece {number}", piece)


def read_texts(folder: str) -> dict[str, str]:
    """The text files under a folder by their path, without hidden and empty ones.

    Raises:
        InvalidInputError: If there is none, or one is not UTF-8 text.
    """
    root, texts = Path(folder), {}
    for path in visible_files(root):
        if path.suffix.lower() in TEXT_SUFFIXES:
            try:
                text = extract_text(path.name, path.read_bytes())
            except InvalidInputError as error:
                raise InvalidInputError(f"{path}: {error}") from error
            if text.strip():
                texts[path.relative_to(root).as_posix()] = text
    if not texts:
        kinds = " or ".join(TEXT_SUFFIXES)
        raise InvalidInputError(f"there is no {kinds} file with text in {folder}")
    return texts


def cut(text: str, tokenizer: Any, size: int, overlap: int) -> Iterator[str]:
    """Pieces of at most `size` tokens, each sharing `overlap` with the one before it.

    A piece may have a token more or less when it is read alone: at its ends words are cut.
    """
    ids = TextEncoder.of(tokenizer).encode_brought(text)
    for start in range(0, max(1, len(ids) - overlap), size - overlap):
        piece = tokenizer.decode(ids[start : start + size])
        if piece.strip():
            yield piece


@dataclass(frozen=True)
class ChromaRows:
    """The rows of a Chroma collection, as they read in prompts.

    Attributes:
        folder: Where the database is.
        collection: Its name.
        form: What of a row stands in prompts, as `rebuild --text`; "" lets each row tell.
        settings: Whose template wrote the chunks that the rows refer to.
    """

    folder: str
    collection: str
    form: str
    settings: BuildSettings

    def items(self) -> Iterator[Item]:
        """The rows, a page at a time."""
        from kvcache_rag.integration import Rows
        from kvcache_rag.integration.rows import row_text
        from kvcache_rag.models.pretrained import brought_template

        brought = brought_template(self.settings.model, self.settings.adapter)
        text_of = row_text(self.form, self.settings.prompt_template(brought))
        collection = self.open()
        # The ids first: rows that come and go meanwhile do not shift the pages.
        ids = iter(collection.get(include=[])["ids"])
        rows = Rows(collection)
        while page := list(islice(ids, _PAGE)):
            for row in rows.get(ids=page):
                yield Item(f"row {row.id!r}", text_of(row))

    def open(self) -> Any:
        """The collection.

        Raises:
            InvalidInputError: If there is no such database or collection.
            MissingExtraError: If chromadb is not installed.
        """
        from argparse import Namespace

        from kvcache_rag.commands.collections import open_client, open_collections

        client = open_client(Namespace(persist_dir=self.folder, host=None))
        return open_collections(client, [self.collection])[0]
