"""Sources of texts for `build`: files cut by tokens, and Chroma collections."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.progress import plain
from kvcache_rag.prompt.tokens import TextEncoder
from kvcache_rag_documents.extraction import is_known_kind, read_folder
from kvcache_rag_server.corpus.texts import Item

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag_server.corpus.worker import BuildSettings


_PAGE: Final = 500  # rows held at a time


@dataclass(frozen=True)
class TextFiles:
    """A folder's files that `ingest` can read, cut by tokens.

    Attributes:
        folder: The folder.
        settings: Name the model whose tokenizer counts tokens.
        size: Tokens of a chunk.
        overlap: Tokens that neighbours share.
    """

    folder: str
    settings: BuildSettings
    size: int
    overlap: int

    def items(self) -> Iterator[Item]:
        """The pieces, file by file; a file that cannot be read is an item with a problem."""
        from kvcache_rag.models.model_names import resolve
        from kvcache_rag.models.pretrained import load_tokenizer

        found = read_folder(self.folder)
        for one in found.left_out:
            if is_known_kind(one.name):
                yield Item(plain(one.name), problem="" if one.is_read else one.reason)
        revision = self.settings.revision
        options = {"revision": revision} if revision else {}
        tokenizer = load_tokenizer(resolve(self.settings.model), options)
        for name, text in found.texts.items():
            for number, piece in enumerate(cut(text, tokenizer, self.size, self.overlap), start=1):
                yield Item(f"{name}, piece {number}", piece)


def cut(text: str, tokenizer: Any, size: int, overlap: int) -> Iterator[str]:
    """Pieces of at most `size` tokens, each sharing `overlap` with the one before it.

    A piece may have a token more or less when it is read alone: at its ends words are cut.
    """
    ids = TextEncoder.for_tokenizer(tokenizer).encode_untrusted(text)
    for start in range(0, max(1, len(ids) - overlap), size - overlap):
        piece = tokenizer.decode(ids[start : start + size])
        if piece.strip():
            yield piece


@dataclass(frozen=True)
class ChromaRows:
    """The rows of a Chroma collection, as written in prompts.

    Attributes:
        place: Folder of the database, or the URL of a Chroma server.
        collection: Its name.
        form: How rows are written in prompts; "" lets each row tell.
        settings: Name the template of the chunks that the rows refer to.
    """

    place: str
    collection: str
    form: str
    settings: BuildSettings

    def items(self) -> Iterator[Item]:
        """The rows, a page at a time."""
        from kvcache_rag.integration import Rows
        from kvcache_rag.integration.rows import row_text
        from kvcache_rag.models.pretrained import bundled_template

        brought = bundled_template(self.settings.model, self.settings.adapter)
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
        from kvcache_rag.commands.collections import open_client, open_collections

        return open_collections(open_client(self.place), [self.collection])[0]
