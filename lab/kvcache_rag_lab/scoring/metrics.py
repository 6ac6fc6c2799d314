"""How right an answer is: each metric as its benchmark defines it.

| metric | benchmark | rule |
|---|---|---|
| `exact_match`, `f1` | SQuAD v1.1 and HotpotQA evaluation scripts | English normalisation, words |
| `f1_longbench` | LongBench `qa_f1_score` | the same words; no yes/no rule |
| `f1_chinese` | LongBench `qa_f1_zh_score` | words that jieba cuts |
| `rouge_l`, `rouge_l_chinese` | LongBench `rouge_score`, `rouge_zh_score` | sets of words |
| `substring_match` | RGB `checkanswer`; lost-in-the-middle | lower-cased substrings, groups |
| `containment` | our own, for answers in sentences | whole words; yes and no come first |
| `wrong_document` | our own, for wrong answers | most of its words stand in a document beside |
| `is_rejection` | RGB `predict` | "insufficient information", "信息不足" |
| `reference_coverage` | RULER `string_match_all` | share of lower-cased substrings |

All give numbers from 0 to 1.  With several right answers, `best` takes the highest.  The two
metrics for Chinese need jieba (extra `eval`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.prompt.words import PUNCTUATION, normalised

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvcache_rag_lab.scoring.question import Language


# LongBench's list of Chinese punctuation, which lacks some, such as the opening mark of a title.
_CHINESE_PUNCTUATION: Final = frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】"
    "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)

# HotpotQA: where either side is one of these, only the same word gets anything.
_CLOSED_ANSWERS: Final = frozenset({"yes", "no", "noanswer"})

_REJECTIONS: Final = ("信息不足", "insufficient information")

_YES_NO: Final = frozenset({"yes", "no"})

# What an answer in a sentence has whatever it says; articles are no words when normalised.
_FUNCTION_WORDS: Final = (
    "yes no not and or but of in on at to by for from with as is are was were be been it its he his"
    " him she her they their them this that these those there which who whom whose what when where"
    " why how do does did has have had"
)

# An answer that quotes has a word of its own, or its last one is cut off.
_MOST: Final = 0.8

# Of the package that LongBench computes ROUGE with: keeps 0 / 0 at 0.
_ROUGE_GUARD: Final = 1e-8


def exact_match(answer: str, reference: str) -> float:
    """Whether both are the same when `normalised` (SQuAD v1.1, HotpotQA)."""
    return float(normalised(answer) == normalised(reference))


def f1(answer: str, reference: str) -> float:
    """Word F1 of HotpotQA (arXiv 1809.09600): SQuAD's, but "yes" and "no" are all or nothing.

    Harmonic mean of the shares of words, counted with repetition, that both have in common.  An
    answer that is "yes", "no" or "noanswer", or a reference that is, scores only as the same word.
    SQuAD's answers have no such words, so this is SQuAD's F1 there.
    """
    text, wanted = normalised(answer), normalised(reference)
    if text != wanted and not _CLOSED_ANSWERS.isdisjoint((text, wanted)):
        return 0.0
    return _overlap(text.split(), wanted.split())


def f1_longbench(answer: str, reference: str) -> float:
    """Word F1 without the rule for yes and no (LongBench's `qa_f1_score`, arXiv 2308.14508)."""
    return _overlap(normalised(answer).split(), normalised(reference).split())


def f1_chinese(answer: str, reference: str) -> float:
    """F1 over jieba's words (LongBench's `qa_f1_zh_score`, arXiv 2308.14508).

    Words are cut first and then stripped of ASCII and Chinese punctuation and white space; those
    of which nothing is left do not count.

    Raises:
        MissingExtraError: If jieba is not installed.
    """
    return _overlap(_chinese_words(answer), _chinese_words(reference))


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L as LongBench reports it: the F measure of the package `rouge` 1.0.1.

    That package scores summaries (section 4 of Lin's ROUGE): texts are cut into sentences at full
    stops, the longest common subsequences of each reference sentence with every sentence of the
    answer are united, and all counts are of *different* words.  An empty text scores 0.  LongBench
    also gives 0 to texts so long that the package's recursion fails; here they get their score.
    """
    sentences, wanted = _sentences(answer), _sentences(reference)
    if not sentences or not wanted:
        return 0.0
    common: set[str] = set()
    for theirs in wanted:
        for ours in sentences:
            common |= _common_subsequence(theirs, ours)
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in sentences for word in sentence})
    return 2.0 * precision * recall / (precision + recall + _ROUGE_GUARD)


def rouge_l_chinese(answer: str, reference: str) -> float:
    """`rouge_l` of the texts with a space between jieba's words (LongBench's `rouge_zh_score`).

    Raises:
        MissingExtraError: If jieba is not installed.
    """
    return rouge_l(" ".join(_cut(answer)), " ".join(_cut(reference)))


def substring_match(
    answer: str, groups: Sequence[Sequence[str]], language: Language = "en"
) -> float:
    """Whether every group has a string that occurs in the answer, in lower case (RGB's rule).

    RGB (arXiv 2309.01431) takes all spaces out of Chinese answers first.  One group with all right
    answers is the rule of lost-in-the-middle (arXiv 2307.03172).

    Raises:
        InvalidInputError: If there is no group.
    """
    if not groups:
        raise InvalidInputError("there is no right answer to look for; give at least one group")
    text = (answer.replace(" ", "") if language == "zh" else answer).lower()
    return float(all(any(phrase.lower() in text for phrase in group) for group in groups))


def containment(answer: str, groups: Sequence[Sequence[str]], language: Language = "en") -> float:
    """Whether every group has a right answer whose words stand in the answer, side by side.

    Both are `normalised` first.  Words are whole, because "us" stands in "because"; a right answer
    of which nothing is left is looked for as it is.  Where every right answer is "yes" or "no" it
    has to be the first word of the answer: "no" stands in half of all sentences, and a model that
    answers in sentences says nothing but the word only by chance.  Chinese is `substring_match`.

    Raises:
        InvalidInputError: If there is no group.
    """
    if not groups:
        raise InvalidInputError("there is no right answer to look for; give at least one group")
    if language == "zh":
        return substring_match(answer, groups, language)
    said = normalised(answer)
    if {normalised(phrase) for group in groups for phrase in group} <= _YES_NO:
        first = said.split(" ", 1)[0]
        return float(all(first in map(normalised, group) for group in groups))
    return float(all(any(_says(answer, said, phrase) for phrase in group) for group in groups))


def _says(answer: str, said: str, phrase: str) -> bool:
    """Whether an answer, which is `said` when normalised, has the words of a phrase."""
    wanted = normalised(phrase)
    return f" {wanted} " in f" {said} " if wanted else phrase.lower() in answer.lower()


def wrong_document(
    answer: str, question: str, documents: Sequence[str], relevant: Collection[int]
) -> float | None:
    """Whether an answer's words are those of a document that does not hold the right one.

    Its words are the `normalised` ones that are neither function words (a fixed set) nor words of
    the question, each counted once: at least 80 % of them stand in one document that is not
    relevant, whole and in any order, and fewer in every relevant one.  An answer without such words
    is from no document.  Whether it is right is not looked at: only wrong answers should be asked.

    Of 250 wrong answers of a 0.5B model that were read, sentences of another document had 86 % of
    their words there or more, for "is" became "was" or the limit of tokens cut the last one; what
    was made up from several documents seldom had more than two thirds in one.

    Args:
        answer: What the model said, in English.
        question: What it was asked.
        documents: It was asked about.
        relevant: Which of these hold the right answer; None comes of an empty one.
    """
    if not relevant:
        return None
    words = set(normalised(answer).split())
    words -= {*_FUNCTION_WORDS.split(), *normalised(question).split()}
    if not words:
        return 0.0
    found = {
        index
        for index, text in enumerate(documents)
        if len(words & set(normalised(text).split())) >= _MOST * len(words)
    }
    return float(bool(found) and found.isdisjoint(relevant))


def is_rejection(answer: str, language: Language = "en") -> bool:
    """Whether the answer says that the documents do not suffice, in RGB's words and letter case."""
    text = answer.replace(" ", "") if language == "zh" else answer
    return any(words in text for words in _REJECTIONS)


def rgb_accuracy(
    answer: str,
    groups: Sequence[Sequence[str]],
    language: Language = "en",
    *,
    only_noise: bool = False,
) -> float:
    """RGB's score of one answer: a rejection is wrong, or right if all documents are noise.

    Args:
        answer: What the model said.
        groups: Right answers, see `substring_match`.
        language: Of the answer.
        only_noise: Whether no document holds the answer (RGB's noise rate 1).
    """
    if is_rejection(answer, language):
        return float(only_noise)
    return substring_match(answer, groups, language)


def reference_coverage(answer: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the answer, in lower case (RULER, arXiv 2404.06654).

    RULER's `string_match_all`, the metric of its needle, tracing and aggregation tasks.

    Raises:
        InvalidInputError: If there are no references.
    """
    if not references:
        raise InvalidInputError("there are no references to look for; give at least one")
    text = answer.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def best(metric: Callable[[str, str], float], answer: str, references: Sequence[str]) -> float:
    """The highest score of `answer` against any reference, as all these benchmarks take it.

    Raises:
        InvalidInputError: If there are no references.
    """
    if not references:
        raise InvalidInputError("there are no references to compare with; give at least one")
    return max(metric(answer, reference) for reference in references)


def _overlap(said: Sequence[str], wanted: Sequence[str]) -> float:
    same = (Counter(said) & Counter(wanted)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(said), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _chinese_words(text: str) -> list[str]:
    unwanted = PUNCTUATION | _CHINESE_PUNCTUATION
    bare = (
        "".join(
            letter for letter in word.lower() if letter not in unwanted and not letter.isspace()
        )
        for word in _cut(text)
    )
    return [word for word in bare if word]


def _sentences(text: str) -> list[list[str]]:
    # A sentence of white space has one empty word, as in the package.
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_subsequence(first: Sequence[str], second: Sequence[str]) -> set[str]:
    """The different words of one longest common subsequence, the package's choice among equals."""
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, ours in enumerate(first):
        for j, theirs in enumerate(second):
            lengths[i + 1][j + 1] = (
                lengths[i][j] + 1 if ours == theirs else max(lengths[i][j + 1], lengths[i + 1][j])
            )
    words: set[str] = set()
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            words.add(first[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def _cut(text: str) -> list[str]:
    return list(_jieba().cut(text, cut_all=False))


@lru_cache(maxsize=1)
def _jieba() -> Any:
    with warnings.catch_warnings():
        # Its sources are of 2020: old escapes, and pkg_resources where that is installed.
        warnings.simplefilter("ignore")
        try:
            jieba = import_module("jieba")
        except ImportError:
            raise MissingExtraError("jieba", "eval") from None
        jieba.setLogLevel("WARNING")  # it tells of its dictionary on stderr
        jieba.initialize()
    return jieba
