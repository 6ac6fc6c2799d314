"""Sources of questions: files, published data sets, and your own files.

**Files** (`read_questions`): one JSON object a line, refused with its line, never repaired.

    {"id": "...", "question": "...", "answers": ["..."],
     "documents": [{"id": "...", "text": "...", "relevant": true}]}

`answers`: any one counts.  `answer_groups`, a list of lists, may stand beside it: then every group
has to be met by one of its strings.

**One's own** (`read_own_questions`, for `verify`): `{"question": "...", "documents": ["...",
"..."], "answers": ["..."]}` is enough; the form above is read, too.  Answers may be left out; then
all that can be asked is whether a policy answers as full prefill does.

**RGB** (`rgb_questions`, arXiv 2309.01431) as its repository publishes it: pools of documents, a
line `{"id", "query", "answer", "positive": [...], "negative": [...]}`, mixed at a noise rate.

**The Hugging Face hub** (`load_hub`), each set turned from its published schema into questions:

| name | hub | schema |
|---|---|---|
| hotpotqa | hotpotqa/hotpot_qa, distractor, validation | HotpotQA (arXiv 1809.09600) |
| 2wiki | xanhho/2WikiMultihopQA, dev | 2WikiMultihopQA (arXiv 2011.01060) |
| musique | dgslibisey/MuSiQue, validation | MuSiQue-Ans (arXiv 2108.00573) |
| squad | rajpurkar/squad, validation | SQuAD v1.1 (arXiv 1606.05250) |
| longbench_* | THUDM/LongBench | LongBench (arXiv 2308.14508), see `longbench` |

Documents that are too long for a chunk are split (`split_documents`, `split_text`).
"""

from __future__ import annotations

import json
import math
import random
import re
import zipfile
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, cast

from kvcache_rag.errors import InvalidInputError, KVCacheRagError, MissingExtraError
from kvcache_rag_lab.evaluation import longbench
from kvcache_rag_lab.evaluation.longbench import LONGBENCH
from kvcache_rag_lab.scoring.question import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvcache_rag_lab.evaluation.longbench import LongBenchSet
    from kvcache_rag_lab.scoring.question import Language, TokenCounter

    Row = Mapping[str, Any]


_SQUAD_DISTRACTORS: Final = 4

_CHINESE: Final = re.compile("[\u3400-\u9fff]")

# Chunks of CacheClip's experiments (arXiv 2510.10129).
CHUNK_TOKENS: Final = 1000

OVERLAP: Final = 50

_WIDE: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"

_SENTENCE_END: Final = re.compile(r"[.!?]+[\"')\]]*\s+|[。！？；]+[”’」』）]*\s*|\n+")

_WORD: Final = re.compile(rf"[{_WIDE}]\s*|[^\s{_WIDE}]+\s*|\s+")

_WIDE_LETTER: Final = re.compile(f"[{_WIDE}]")


def read_questions(path: Path, language: Language = "en") -> list[Question]:
    """Read a question set.

    Args:
        path: A file of lines as above.
        language: Of its texts.

    Raises:
        InvalidInputError: If there is no such file, or a line is not of that form: file, line and
            what is wrong.
    """
    questions = []
    for row in _rows(path):
        documents = row.list("documents")
        if not documents:
            raise row.error("has no documents")
        texts = [_Row(row.where, item, "a document").text("text") for item in documents]
        flags = [item.get("relevant") for item in documents]
        if not all(isinstance(flag, bool) for flag in flags):
            raise row.error('has a document whose "relevant" is neither true nor false')
        answers, groups = row.answers()
        questions.append(
            Question(
                id=row.text("id"),
                question=row.text("question"),
                chunks=tuple(texts),
                answers=answers,
                answer_groups=groups,
                relevant=tuple(index for index, flag in enumerate(flags) if flag),
                language=language,
            )
        )
    return questions


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object a line; blank lines are skipped.

    Raises:
        InvalidInputError: If there is no such file, or a line is not a JSON object.
    """
    return [content for _, content in _objects(path)]


class _Row:
    """A line being read; its errors say where it stands."""

    def __init__(self, where: str, content: Any, what: str = "the row") -> None:
        self.where, self._what = where, what
        if not isinstance(content, dict):
            raise self.error("is not a JSON object")
        self._content: dict[str, Any] = content

    def error(self, wrong: str) -> InvalidInputError:
        return InvalidInputError(f"{self.where}: {self._what} {wrong}; correct or remove it")

    def text(self, name: str) -> str:
        value = self._content.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f'needs a text as "{name}"')
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(f'has half of a surrogate pair in "{name}"') from error
        return value

    def list(self, name: str) -> list[Any]:
        value = self._content.get(name)
        if not isinstance(value, list):
            raise self.error(f'needs a list as "{name}"')
        return value

    def answers(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        answers = self._strings("answers", self.list("answers"))
        if "answer_groups" not in self._content:
            return answers, ()
        groups = self.list("answer_groups")
        if not groups:
            raise self.error('has empty "answer_groups"')
        return answers, tuple(self._strings("answer_groups", group) for group in groups)

    def _strings(self, name: str, values: Any) -> tuple[str, ...]:
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(value, str) and value for value in values)
        ):
            raise self.error(f'needs one text or more in "{name}"')
        return tuple(values)


def _rows(path: Path) -> Iterator[_Row]:
    """Rows of a file, with different ids."""
    seen: dict[str, str] = {}
    for where, content in _objects(path):
        row = _Row(where, content)
        name = row.text("id")
        if name in seen:
            raise row.error(f"has the id {name!r} of {seen[name]}")
        seen[name] = where
        yield row


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}; name the folder that holds it")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                content = json.loads(line.decode("utf-8-sig"))  # Windows marks the first
            except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
                raise InvalidInputError(
                    f"{where}: this is not JSON in UTF-8 ({error}); correct or remove it"
                ) from None
            if not isinstance(content, dict):
                raise _Row(where, {}).error("is not a JSON object")
            yield where, content


def read_own_questions(path: Path) -> list[Question]:
    """Read a file of questions.

    Raises:
        InvalidInputError: If it cannot be read or is empty, or a line is not of the form above;
            file, line and what is wrong.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidInputError(
            f"the questions {path} cannot be read ({error.strerror}); check the path"
        ) from error
    questions, seen = [], set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        question = _question(line, f"{path}, line {number}", number)
        if question.id in seen:
            raise InvalidInputError(
                f"{path}, line {number}: another line has the id {question.id!r}; make it unique"
            )
        seen.add(question.id)
        questions.append(question)
    if not questions:
        raise InvalidInputError(
            f"{path} has no questions; write one JSON object a line, with question, documents and "
            "answers"
        )
    return questions


def _question(line: bytes, where: str, number: int) -> Question:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where}: this is not JSON in UTF-8; correct it") from error
    if not isinstance(row, dict):
        raise InvalidInputError(f'{where}: this is not an object {{"question": ...}}; correct it')
    documents = row.get("documents")
    if not isinstance(documents, list) or not documents:
        raise InvalidInputError(
            f'{where}: "documents" must be a list of at least one text; add what the retriever '
            "found"
        )
    chunks = tuple(_document(document, where) for document in documents)
    marks = [isinstance(one, dict) and one.get("relevant") is True for one in documents]
    answers = _texts(row.get("answers"), "answers", where)
    lists = row.get("answer_groups") or []
    if not isinstance(lists, list):
        raise InvalidInputError(f'{where}: "answer_groups" must be a list of lists; correct it')
    groups = tuple(_texts(group, "answer_groups", where) for group in lists)
    if not all(groups):
        raise InvalidInputError(f'{where}: a group of "answer_groups" is empty; leave it out')
    question = _text(row.get("question"), "question", where)
    joined = "".join((question, *answers, *(text for group in groups for text in group)))
    return Question(
        id=str(row.get("id", f"line {number}")),
        question=question,
        chunks=chunks,
        answers=answers,
        answer_groups=groups,
        relevant=tuple(index for index, is_relevant in enumerate(marks) if is_relevant),
        language="zh" if _CHINESE.search(joined) else "en",
    )


def _document(given: Any, where: str) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    return _text(text, "documents", where)


def _text(given: Any, name: str, where: str) -> str:
    if not isinstance(given, str) or not given.strip():
        raise InvalidInputError(f'{where}: "{name}" needs a text that is not empty; add it')
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f'{where}: "{name}" holds half of a surrogate pair, which is no text; correct it'
        ) from error
    return given


def _texts(given: Any, name: str, where: str) -> tuple[str, ...]:
    """A list of texts; one text is a list of itself, nothing an empty list."""
    if given is None:
        return ()
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list):
        raise InvalidInputError(f'{where}: "{name}" must be a list of texts; correct it')
    return tuple(_text(text, name, where) for text in given)


def rgb_questions(
    rows: Iterable[Row], language: Language, noise: float | None, passages: int = 5
) -> Iterator[Question]:
    """RGB's own files: `passages` documents, of which the share `noise` is noise, rounded up.

    RGB's `processdata`: the first documents of each pool, one side filled up from the other where
    it is too short; for integration (`positive` is a list of lists) one document per part of the
    answer first, then the second of each, and so on, and noise for what is left.  RGB draws order,
    and documents of a part, with a fixed random seed; here the row's id draws them.  Without
    `noise`: all documents of both pools.

    Raises:
        InvalidInputError: If `noise` is not within 0 and 1 or `passages` is below 1.
    """
    if not (noise is None or 0 <= noise <= 1) or passages < 1:
        raise InvalidInputError(
            f"{passages} passages with noise {noise} cannot be; noise is 0 to 1"
        )
    for row in rows:
        rng = random.Random(f"rgb/{row['id']}")
        positive, negative = _rgb_documents(row, noise, passages, rng)
        drawn = [(text, True) for text in positive] + [(text, False) for text in negative]
        rng.shuffle(drawn)
        groups = _rgb_groups(row["answer"])
        yield Question(
            id=str(row["id"]),
            question=row["query"],
            chunks=tuple(text for text, _ in drawn),
            answers=tuple(dict.fromkeys(answer for group in groups for answer in group)),
            answer_groups=groups if len(groups) > 1 else (),
            relevant=tuple(index for index, (_, relevant) in enumerate(drawn) if relevant),
            language=language,
        )


def _rgb_groups(answer: Any) -> tuple[tuple[str, ...], ...]:
    parts = answer if isinstance(answer, list) else [answer]
    return tuple(tuple(part) if isinstance(part, list) else (part,) for part in parts)


def _rgb_documents(
    row: Row, noise: float | None, passages: int, rng: random.Random
) -> tuple[list[str], list[str]]:
    positive, negative = row["positive"], row["negative"]
    parted = bool(positive) and isinstance(positive[0], list)
    if noise is None:
        return ([text for part in positive for text in part] if parted else positive), negative
    noisy = math.ceil(passages * noise)
    helpful = passages - noisy
    if parted:
        parts = [rng.sample(part, len(part)) for part in positive]
        taken = [part[0] for part in parts]
        for depth in range(1, max(map(len, parts))):
            rest = [part[depth] for part in parts if len(part) > depth]
            taken += rest[: max(0, helpful - len(taken))]
        return taken, negative[: max(0, passages - len(taken))]
    if noise == 1:
        return [], negative[:passages]
    if noisy > len(negative):
        noisy = len(negative)
        helpful = passages - noisy
    elif helpful > len(positive):
        helpful = len(positive)
        noisy = passages - helpful
    return positive[:helpful], negative[:noisy]


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
            chunks=tuple(
                f"{paragraph['title']}\n{paragraph['paragraph_text']}" for paragraph in paragraphs
            ),
            answers=(row["answer"], *row["answer_aliases"]),
            relevant=tuple(
                index for index, paragraph in enumerate(paragraphs) if paragraph["is_supporting"]
            ),
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


def _longbench(one: LongBenchSet) -> HubSource:
    # The repository's loading script no longer runs; this is the archive that it unpacked.
    read = partial(longbench.questions, one)
    return HubSource("THUDM/LongBench", read, file="data.zip", member=f"data/{one.name}.jsonl")


HUB: Final[Mapping[str, HubSource]] = {
    "hotpotqa": HubSource(
        "hotpotqa/hotpot_qa", hotpot_questions, split="validation", config="distractor"
    ),
    "2wiki": HubSource("xanhho/2WikiMultihopQA", hotpot_questions, file="dev.parquet"),
    "musique": HubSource("dgslibisey/MuSiQue", musique_questions, split="validation"),
    "squad": HubSource("rajpurkar/squad", squad_questions, split="validation"),
    **{name: _longbench(one) for name, one in LONGBENCH.items()},
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


def split_documents(question: Question, split: Callable[[str], list[str]]) -> Question:
    """Split every document; parts of a relevant one stay relevant if they hold an answer.

    Where no part holds the letters of an answer (free-form answers), all parts of the relevant
    documents stay relevant.
    """
    parts = [(part, index) for index, text in enumerate(question.chunks) for part in split(text)]
    among = [place for place, (_, index) in enumerate(parts) if index in question.relevant]
    holding = [
        place
        for place in among
        if any(answer.lower() in parts[place][0].lower() for answer in question.answers)
    ]
    return replace(
        question, chunks=tuple(part for part, _ in parts), relevant=tuple(holding or among)
    )


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has, where no tokenizer is at hand.

    One for each Chinese, Japanese or Korean letter, and one for every four other characters.
    """
    wide = len(_WIDE_LETTER.findall(text))
    return wide + (len(text) - wide + 3) // 4


def split_text(
    text: str, count: TokenCounter, *, tokens: int = CHUNK_TOKENS, overlap: int = OVERLAP
) -> list[str]:
    """Split `text` into chunks, each beginning with the end of the one before.

    A chunk ends at the last end of a sentence that fits; a sentence that is too long by itself is
    cut between words, a word between letters.  Every part of the text is in a chunk.

    Args:
        text: Anything; white space around chunks is dropped.
        count: Number of tokens of a text.
        tokens: Most tokens of a chunk (a single letter of more tokens stays whole).
        overlap: Most tokens that a chunk shares with the one before; it begins at a word.

    Raises:
        InvalidInputError: If `tokens` is below 1 or `overlap` is not within 0 and `tokens`.
    """
    if tokens < 1 or not 0 <= overlap < tokens:
        raise InvalidInputError(
            f"chunks of {tokens} tokens cannot overlap by {overlap}; "
            "choose at least 1 token and an overlap below that"
        )
    sentences = [match.end() for match in _SENTENCE_END.finditer(text)]
    words = [match.end() for match in _WORD.finditer(text)]
    letters = range(1, len(text) + 1)
    if not sentences or sentences[-1] < len(text):
        sentences.append(len(text))
    chunks = []
    start = stop = 0
    while stop < len(text):
        for ends in (sentences, words, letters):
            further = _furthest(text, start, stop, ends, count, tokens)
            if further > stop:
                break
        else:
            further = stop + 1
        stop = further
        chunks.append(text[start:stop].strip())
        start = _overlap_start(text, start, stop, words, count, overlap)
    return [chunk for chunk in chunks if chunk]


def _furthest(
    text: str, start: int, stop: int, ends: Sequence[int], count: TokenCounter, tokens: int
) -> int:
    """The last of `ends` behind `stop` up to which the text from `start` fits; else `stop`."""
    first = bisect_right(ends, stop)

    def fits(index: int) -> bool:
        return count(text[start : ends[index]].strip()) <= tokens

    step, good = 1, first - 1
    while good + step < len(ends) and fits(good + step):
        good += step
        step *= 2
    bad = min(good + step, len(ends))  # does not fit, or is not there
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return ends[good] if good >= first else stop


def _overlap_start(
    text: str, start: int, stop: int, words: Sequence[int], count: TokenCounter, overlap: int
) -> int:
    """Where the next chunk begins: the first word of the overlap, or `stop` without one."""
    position = stop
    for index in range(bisect_right(words, stop - 1) - 1, -1, -1):
        begin = words[index]
        if begin <= start or count(text[begin:stop].strip()) > overlap:
            break
        position = begin
    return position
