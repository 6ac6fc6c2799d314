"""Question sets of the Hugging Face hub, each turned from its published schema into questions.

| name | hub | schema |
|---|---|---|
| hotpotqa | hotpotqa/hotpot_qa, distractor, validation | HotpotQA (arXiv 1809.09600) |
| 2wiki | xanhho/2WikiMultihopQA, dev | 2WikiMultihopQA (arXiv 2011.01060) |
| musique | dgslibisey/MuSiQue, validation | MuSiQue-Ans (arXiv 2108.00573) |
| squad | rajpurkar/squad, validation | SQuAD v1.1 (arXiv 1606.05250) |
| dureader, multifieldqa_zh | THUDM/LongBench | LongBench (arXiv 2308.14508) |

RGB is not on the hub; `rgb` reads the files of its repository.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, cast

from kvcache_rag.errors import InvalidInputError, KVCacheRagError, MissingExtraError
from kvcache_rag.evaluation.question import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    Row = Mapping[str, Any]

_SQUAD_DISTRACTORS: Final = 4
_LONGBENCH_PASSAGE: Final = re.compile(r"^(?:Passage \d+:|文章\s*\d+)[ \t]*\n?", re.MULTILINE)


def hotpot_questions(rows: Iterable[Row]) -> Iterator[Question]:
    """HotpotQA and 2WikiMultihopQA: paragraphs of sentences, supporting ones named by title.

    Takes the columns of the hub (`{"title": [...], "sentences": [...]}`), the pairs of the original
    files, and either written as JSON.
    """
    for row in rows:
        paragraphs = _pairs(row["context"], ("sentences", "content"))
        supporting = {title for title, _ in _pairs(row["supporting_facts"], ("sent_id",))}
        yield Question(
            id=str(row["id"] if "id" in row else row["_id"]),
            question=row["question"],
            chunks=tuple(f"{title}\n{_sentences(texts)}" for title, texts in paragraphs),
            answers=(row["answer"],),
            relevant=tuple(
                index for index, (title, _) in enumerate(paragraphs) if title in supporting
            ),
        )


def musique_questions(rows: Iterable[Row]) -> Iterator[Question]:
    """MuSiQue-Ans: twenty paragraphs, each marked; aliases of the answer count, too.

    Rows that are marked as unanswerable (MuSiQue-Full) are left out.
    """
    for row in rows:
        if not row.get("answerable", True):
            continue
        paragraphs = row["paragraphs"]
        yield Question(
            id=row["id"],
            question=row["question"],
            chunks=tuple(f"{one['title']}\n{one['paragraph_text']}" for one in paragraphs),
            answers=(row["answer"], *row["answer_aliases"]),
            relevant=tuple(index for index, one in enumerate(paragraphs) if one["is_supporting"]),
        )


def squad_questions(rows: Iterable[Row]) -> Iterator[Question]:
    """SQuAD v1.1: the paragraph, and the first four others of its article without an answer.

    The paragraphs stand in the order of the article.  Short articles give fewer.
    """
    rows = list(rows)
    articles: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        articles[row["title"]].setdefault(row["context"])
    for row in rows:
        answers = tuple(dict.fromkeys(row["answers"]["text"]))
        own, article = row["context"], list(articles[row["title"]])
        others = [
            text
            for text in article
            if text != own and not any(answer.lower() in text.lower() for answer in answers)
        ]
        kept = {own, *others[:_SQUAD_DISTRACTORS]}
        chunks = tuple(text for text in article if text in kept)
        yield Question(
            id=row["id"],
            question=row["question"],
            chunks=chunks,
            answers=answers,
            relevant=(chunks.index(own),),
        )


def longbench_questions(rows: Iterable[Row]) -> Iterator[Question]:
    """LongBench: one text of one document, or of passages with a heading each.

    It does not say which passages hold the answer, so `relevant` is empty unless there is only one.
    """
    for row in rows:
        pieces = (piece.strip() for piece in _LONGBENCH_PASSAGE.split(row["context"]))
        chunks = tuple(piece for piece in pieces if piece)
        yield Question(
            id=row["_id"],
            question=row["input"],
            chunks=chunks,
            answers=tuple(row["answers"]),
            relevant=(0,) if len(chunks) == 1 else (),
            language="zh" if row["language"] == "zh" else "en",
        )


@dataclass(frozen=True)
class HubSource:
    """Where a data set lies on the hub.

    Attributes:
        repo: Its repository.
        read: Turns rows into questions.
        split: Which rows, of a repository that `datasets` loads by name.
        config: Which variant of it.
        file: Instead: a file of the repository, parquet or a zip archive.
        member: File of JSON lines in the archive.
    """

    repo: str
    read: Callable[[Iterable[Row]], Iterator[Question]]
    split: str = ""
    config: str | None = None
    file: str = ""
    member: str = ""


def _longbench(name: str) -> HubSource:
    # The repository's loading script no longer runs; this is the archive that it unpacked.
    return HubSource(
        "THUDM/LongBench", longbench_questions, file="data.zip", member=f"data/{name}.jsonl"
    )


HUB: Final[Mapping[str, HubSource]] = {
    "hotpotqa": HubSource(
        "hotpotqa/hotpot_qa", hotpot_questions, split="validation", config="distractor"
    ),
    "2wiki": HubSource("xanhho/2WikiMultihopQA", hotpot_questions, file="dev.parquet"),
    "musique": HubSource("dgslibisey/MuSiQue", musique_questions, split="validation"),
    "squad": HubSource("rajpurkar/squad", squad_questions, split="validation"),
    "dureader": _longbench("dureader"),
    "multifieldqa_zh": _longbench("multifieldqa_zh"),
}


def load_hub(name: str) -> list[Question]:
    """Load a data set by its name in `HUB`.

    Raises:
        MissingExtraError: If `datasets` is not installed.
        InvalidInputError: If it cannot be loaded (no connection, HF_HUB_OFFLINE, moved) or its
            rows are not of the schema that it was published with.
    """
    source = HUB.get(name)
    if source is None:
        raise InvalidInputError(
            f"{name} is not on the hub; name a folder that holds {name}.jsonl with --data"
        )
    try:
        rows = _load(source)
    except KVCacheRagError:
        raise
    except Exception as error:  # of many libraries: http, hub, arrow, zip
        raise InvalidInputError(
            f"the data set {source.repo} could not be loaded ({type(error).__name__}); go online, "
            f"or name a folder that holds {name}.jsonl with --data"
        ) from error
    return of_schema(f"the data set {source.repo}", source.read, rows)


def _load(source: HubSource) -> Iterable[Row]:
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise MissingExtraError("datasets", "eval") from None
    if not source.file:
        rows = datasets.load_dataset(source.repo, source.config, split=source.split)
        return cast("Iterable[Row]", rows)
    download = import_module("huggingface_hub").hf_hub_download
    path = download(source.repo, source.file, repo_type="dataset")
    if source.member:
        with zipfile.ZipFile(path) as archive, archive.open(source.member) as lines:
            return [json.loads(line) for line in lines]
    # "train" is what `datasets` calls the rows of a file.
    rows = datasets.load_dataset("parquet", data_files=path, split="train")
    return cast("Iterable[Row]", rows)


def of_schema(
    where: object, read: Callable[[Iterable[Row]], Iterator[Question]], rows: Iterable[Row]
) -> list[Question]:
    """All that `read` makes of `rows`.

    Args:
        where: What to call the data set.
        read: One of the converters above.
        rows: What it reads.

    Raises:
        InvalidInputError: If the rows are not of the schema that `read` expects.
    """
    try:
        return list(read(rows))
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{where} has another schema than it was published with ({error!r}); "
            "name a folder of JSON lines in the project's own format with --data"
        ) from error


def _pairs(value: Any, others: tuple[str, ...]) -> list[tuple[str, Any]]:
    """(title, rest) of columns or of pairs, either maybe as JSON."""
    value = json.loads(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        other = next(value[name] for name in others if name in value)
        return list(zip(value["title"], other, strict=True))
    return [(title, rest) for title, rest in value]


def _sentences(texts: list[str]) -> str:
    """Sentences as a paragraph; HotpotQA's begin with a space of their own, 2Wiki's do not."""
    spaced = (text if text[:1].isspace() else f" {text}" for text in texts)
    return "".join(spaced).strip()
