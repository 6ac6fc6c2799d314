"""Which of the retrieved chunks match a question: the laws of a choice, by words and numbers."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcache_rag import BestFew
from kvcache_rag.generation.question import StoredChunk
from kvcache_rag.generation.request import retrieved_chunks
from kvcache_rag.kv.chunk import ChunkKey
from kvcache_rag.policies.bestfew import MOST, NEAR
from kvcache_rag.policies.relevance import Retrieved

if TYPE_CHECKING:
    from collections.abc import Sequence

WORDS = ("elbe", "bridge", "torgau", "opened", "banana", "1994", "of", "the")
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(" ".join)
QUESTION = st.lists(st.sampled_from((*WORDS, "unheard")), max_size=6).map(" ".join)
# In steps, so that no two differ by less than sums are rounded.
SCORE = st.integers(-1000, 1000).map(lambda number: number / 8)
CHUNKS = st.lists(st.tuples(TEXT, SCORE), min_size=1, max_size=8)
ASKED = "When was the Elbe bridge of Torgau opened?"
ANY_LETTERS = st.text(max_size=40)


def of(question: str, chunks: Sequence[tuple[str, float]], **changes: Any) -> Retrieved:
    texts, scores = zip(*chunks, strict=True)
    return Retrieved(**{"question": question, "texts": texts, "scores": scores, **changes})


# ---------------------------------------------------------------------- laws
@given(QUESTION, CHUNKS, st.sampled_from((0.125, 1.0, 3.0, 1e6)), st.integers(-50, 50))
def test_law_the_unit_and_the_zero_of_scores_do_not_matter(
    question: str, chunks: list[tuple[str, float]], scale: float, shift: int
) -> None:
    plain = of(question, chunks)
    moved = of(question, chunks, scores=[scale * (one + shift) for _, one in chunks])
    assert moved.relevance == pytest.approx(plain.relevance, abs=1e-7)
    assert len(plain.relevance) == len(plain) == len(chunks)


@given(QUESTION, CHUNKS, st.randoms(use_true_random=False))
def test_law_the_order_in_which_chunks_are_given_does_not_matter(
    question: str, chunks: list[tuple[str, float]], drawn: Any
) -> None:
    plain = of(question, chunks)
    assume(len({*plain.relevance}) == len(chunks))  # of equal ones, the first is better
    order = [*range(len(chunks))]
    drawn.shuffle(order)
    moved = of(question, [chunks[index] for index in order])
    assert moved.relevance == tuple(plain.relevance[index] for index in order)
    assert tuple(order[index] for index in moved.ranked()) == plain.ranked()
    for policy in (BestFew(), BestFew(1), BestFew(3)):
        assert tuple(order[index] for index in policy.plan(moved).order) == policy.plan(plain).order


@given(QUESTION, CHUNKS, st.booleans())
def test_law_of_a_choice(question: str, chunks: list[tuple[str, float]], scored: bool) -> None:
    retrieved = of(question, chunks, **({} if scored else {"scores": None}))
    ranked = retrieved.ranked()
    assert sorted(ranked) == [*range(len(chunks))]
    relevance = [retrieved.relevance[index] for index in ranked]
    assert relevance == sorted(relevance, reverse=True)
    few = BestFew().plan(retrieved).order
    assert 1 <= len(few) <= MOST
    assert few == ranked[: len(few)]
    behind = [relevance[0] - one for one in relevance]
    assert all(distance <= NEAR for distance in behind[: len(few)])
    assert all(distance > NEAR for distance in behind[len(few) : MOST])
    for count in (1, 2, 20):
        assert BestFew(count).plan(retrieved).order == ranked[:count]


@given(ANY_LETTERS, st.lists(ANY_LETTERS, max_size=5))
def test_whatever_is_written_is_ranked(question: str, texts: list[str]) -> None:
    retrieved = Retrieved(question, tuple(texts))
    assert all(map(math.isfinite, retrieved.relevance))
    assert sorted(retrieved.ranked()) == [*range(len(texts))]
    few = BestFew().plan(retrieved).order
    assert few == retrieved.ranked()[: len(few)]


# ---------------------------------------------------------------------- numbers
@pytest.mark.parametrize(
    ("scores", "ranked"),
    [
        ([sys.float_info.max, -sys.float_info.max, 0.0], (0, 2, 1)),
        ([sys.float_info.max, sys.float_info.max, 0.0], (0, 1, 2)),
        ([5e-324, 0.0, 1e-323], (2, 0, 1)),
        ([-5e-324, -1e-323, 0.0], (2, 0, 1)),
        ([1e200, 1.0, 2e200], (2, 0, 1)),
        ([1e-200, 3e-200, 2e-200], (1, 2, 0)),
        ([1, 3, 2], (1, 2, 0)),
    ],
)
def test_scores_of_any_size_rank(scores: list[float], ranked: tuple[int, ...]) -> None:
    retrieved = Retrieved("", ("a", "b", "c"), scores)
    assert retrieved.ranked() == ranked
    assert all(map(math.isfinite, retrieved.relevance))


@pytest.mark.parametrize("score", [0.0, 1.0, -0.3, 1e300, 0.1 + 0.2])
def test_equal_scores_leave_it_to_the_words(score: float) -> None:
    texts = ("Bananas are sweet.", "The Elbe bridge of Torgau.", "Apples are, too.")
    assert Retrieved("", texts, [score] * 3).relevance == (0.0, 0.0, 0.0)
    assert Retrieved("", texts, [score] * 3).ranked() == (0, 1, 2)
    assert Retrieved(ASKED, texts, [score] * 3).ranked() == (1, 0, 2)


def test_without_scores_the_order_counts_for_less_than_words_and_more_than_nothing() -> None:
    texts = ("Bananas are sweet.", "Apples are, too.", "The Elbe bridge of Torgau.")
    assert Retrieved("", texts).ranked() == (0, 1, 2)
    assert Retrieved(ASKED, texts).ranked() == (2, 0, 1)


@pytest.mark.parametrize("scores", [None, [7.0]])
def test_one_chunk_and_none(scores: list[float] | None) -> None:
    one = Retrieved(ASKED, ("The Elbe bridge.",), scores)
    assert (one.ranked(), one.relevance) == ((0,), (0.0,))
    none = Retrieved(ASKED, (), None if scores is None else [])
    assert (none.ranked(), none.relevance, len(none)) == ((), (), 0)
    for policy in (BestFew(), BestFew(2)):
        assert policy.plan(one).order == (0,)
        assert policy.plan(none).order == ()


# ---------------------------------------------------------------------- words
@pytest.mark.parametrize("question", ["", "  ", "?!", "Wann eröffnete man jenes Bauwerk?"])
@pytest.mark.parametrize("scores", [None, [0.2, 0.3, 0.1]])
def test_a_question_without_a_word_of_theirs_leaves_the_retrievers_order(
    question: str, scores: list[float] | None
) -> None:
    texts = ("The Elbe bridge of Torgau.", "Bananas are sweet.", "It was opened in 1994.")
    retrieved = Retrieved(question, texts, scores)
    assert retrieved.ranked() == ((1, 0, 2) if scores else (0, 1, 2))


def test_names_count_in_a_question_of_another_language() -> None:
    texts = ("Bananas are sweet.", "The Elbe bridge of Torgau.", "It was opened in 1994.")
    asked = "Wann eröffnete Torgau jenes Bauwerk?"
    assert Retrieved(asked, texts, [1.0] * 3).ranked()[0] == 1
    # A few names count for less than what a retriever is sure of.
    assert Retrieved(asked, texts, [9.0, 1.0, 1.0]).ranked()[0] == 0


def test_a_chunk_that_is_known_by_its_key_alone_leaves_the_retrievers_order() -> None:
    key = ChunkKey("0" * 64, "0" * 64, "", 3, 1)
    texts = ["Bananas are sweet.", "The Elbe bridge of Torgau.", "Apples are, too."]
    assert retrieved_chunks(ASKED, texts, None).ranked() == (1, 0, 2)
    rows = [StoredChunk(key, text) for text in texts]
    assert retrieved_chunks(ASKED, rows, None) == retrieved_chunks(ASKED, texts, None)
    unknown = retrieved_chunks(ASKED, [*texts[:2], key], None)
    assert unknown.texts == (*texts[:2], "")
    assert unknown.ranked() == (0, 1, 2)


@pytest.mark.parametrize(
    "wrong",
    [5, None, b"text", StoredChunk(ChunkKey("0", "0", "", 3, 1), 5)],  # type: ignore[arg-type]  # no text
)
def test_what_is_no_chunk_is_left_to_who_says_so(wrong: Any) -> None:
    assert retrieved_chunks(ASKED, ["a", wrong], None).texts == ("a", "")


@pytest.mark.parametrize(
    ("question", "texts", "best"),
    [
        ("東京都知事は誰ですか", ("大阪の食べ物", "東京都知事の名前", "京都の寺"), 1),
        ("长城有多长", ("北京的天气很好。", "黄河是一条河。", "长城长两万公里。"), 2),
        ("カタカナの辞書は?", ("ひらがなの本", "カタカナの辞書を買う"), 1),
        ("서울의 인구는?", ("부산의 바다", "서울의 인구는 많다"), 1),
        ("איפה חיים פילים?", ("הים כחול.", "פילים חיים באפריקה."), 1),
        ("NEC PC-9801 の発売日", ("富士通の発売日", "NEC PC-9801 は古い"), 1),
    ],
)
def test_writing_without_spaces_and_other_letters(
    question: str, texts: tuple[str, ...], best: int
) -> None:
    assert Retrieved(question, texts, [1.0] * len(texts)).ranked()[0] == best


def test_endings_and_case_do_not_matter() -> None:
    texts = ("Bananas are sweet.", "INSTALLATION of printers")
    assert Retrieved("How do I install a printer?", texts, [1, 1]).ranked() == (1, 0)


def test_a_word_that_few_have_says_more_than_one_that_all_have() -> None:
    texts = ("the form the form the form", "the form 4711", "the form of the year")
    assert Retrieved("the form 4711", texts).ranked()[0] == 1


def test_without_scores_a_name_counts_whatever_else_no_chunk_has() -> None:
    texts = ("The director of Savo is Osha.", "She lives in Bran.", "The Mobrit costs 412 euros.")
    assert Retrieved("What does the Mobrit cost?", texts).ranked()[0] == 2
