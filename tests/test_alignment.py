"""Scores reach the right tokens through any two tokenizers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers_zoo import TOKENIZERS, WithoutOffsets, byte_level, encode, metaspace, word_pieces

from kvcache_rag import InvalidInputError
from kvcache_rag.prompt.alignment import (
    highest,
    shared_out,
    spread,
    token_offsets,
    within,
)
from kvcache_rag.prompt.offsets import chunk_offsets, chunk_scores, chunk_text
from kvcache_rag.prompt.template import PromptTemplate

BARE = PromptTemplate(chunk_start="", chunk_end="")

TEXT = "The staff of Grabra is 5663623 people, and its river is the Sora in 2012."
EMOJI = "👩‍👩‍👧 e\u0301 🇯🇵 ½ ﬁ İ ß 東京59392"
texts = st.text(
    st.one_of(
        st.sampled_from("abc xyz 0123456789.,\n"),
        st.sampled_from("äßéñ東京日本はПр👩🎉\u200d\u0301½ﬁ\ufffd\u2581"),
        st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]),
    ),
    min_size=1,
    max_size=40,
)


def both(name: str) -> list[Any]:
    fast = TOKENIZERS[name]()
    return [fast, WithoutOffsets(fast)]


def covered(offsets: list[tuple[int, int]]) -> set[int]:
    return {place for start, stop in offsets for place in range(start, stop)}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts)
@example(text=EMOJI)
@example(text="a👩b\u0fd5\ufffd\ufffd.")
@settings(max_examples=60, deadline=None)
def test_offsets_lie_in_the_text_in_order_and_leave_no_letter_out(name: str, text: str) -> None:
    letters = {place for place, letter in enumerate(text) if not letter.isspace()}
    for tokenizer in both(name):
        ids = encode(tokenizer, text)
        offsets = token_offsets(tokenizer, text, ids)
        assert len(offsets) == len(ids)
        assert all(0 <= start <= stop <= len(text) for start, stop in offsets)
        starts = [start for start, stop in offsets if start < stop]
        assert starts == sorted(starts)
        if name in ("byte level", "metaspace"):
            assert letters - {i for i in letters if text[i] == "\u2581"} <= covered(offsets)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text("abc XYZ äé 0123456789.,東京👩\n", min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_decoding_finds_the_letters_that_the_tokenizer_itself_names(name: str, text: str) -> None:
    fast, plain = both(name)
    ids = encode(fast, text)
    if fast.unk_token_id in ids or "?" in fast.decode(ids):
        return  # what was not known is not written back; the next test has such texts
    told, found = token_offsets(fast, text, ids), token_offsets(plain, text, ids)
    letters = {place for place, letter in enumerate(text) if not letter.isspace()}
    assert covered(told) & letters == covered(found) & letters
    for wide, narrow in zip(told, found, strict=True):  # a mark of a space may claim a letter
        assert covered([narrow]) & letters <= covered([wide])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_unknown_characters_do_not_shift_the_rest(name: str) -> None:
    text = "Sora \u0fd5\u0fd6 59392 \u0fd5 end"
    for tokenizer in both(name):
        offsets = token_offsets(tokenizer, text, encode(tokenizer, text))
        digits = [span for span in offsets if text[slice(*span)].strip().isdigit()]
        assert {i for i in covered(digits) if text[i].isdigit()} == set(range(8, 13))


@pytest.mark.parametrize("target", TOKENIZERS)
@pytest.mark.parametrize("source", TOKENIZERS)
@pytest.mark.parametrize("number", ["5663623", "2012"])
def test_a_number_that_one_model_marks_is_the_number_that_the_other_computes(
    source: str, target: str, number: str
) -> None:
    place = TEXT.index(number)
    for one in both(source):
        spans = token_offsets(one, TEXT, encode(one, TEXT))
        touched = [start < place + len(number) and stop > place for start, stop in spans]
        characters = spread(spans, torch.tensor(touched).float(), len(TEXT))
        assert characters[place : place + len(number)].tolist() == [1.0] * len(number)
        for other in both(target):
            ids = encode(other, TEXT)
            scores = chunk_scores(other, BARE, TEXT, ids, characters).tolist()
            pairs = zip(token_offsets(other, TEXT, ids), scores, strict=True)
            marked = "".join(TEXT[slice(*span)] for span, score in pairs if score == 1)
            assert re.sub(r"\D", "", marked) == number
            assert marked.strip(" .") == number


@given(text=texts)
@settings(max_examples=60, deadline=None)
def test_with_one_tokenizer_scores_come_back(text: str) -> None:
    tokenizer = byte_level()
    ids = encode(tokenizer, text)
    offsets = token_offsets(tokenizer, text, ids)
    scores = torch.rand(len(ids))
    back = chunk_scores(tokenizer, BARE, text, ids, spread(offsets, scores, len(text)))
    for index, (start, stop) in enumerate(offsets):
        pairs = zip(scores.tolist(), offsets, strict=True)
        rivals = [score for score, (first, last) in pairs if first < stop and last > start]
        assert float(back[index]) == pytest.approx(max(rivals))


@given(text=texts)
@settings(max_examples=60, deadline=None)
def test_dealt_out_weights_keep_their_sum(text: str) -> None:
    tokenizer = metaspace()
    ids = encode(tokenizer, text)
    offsets = token_offsets(tokenizer, text, ids)
    weights = torch.rand(len(ids), dtype=torch.float64)
    kept = sum(float(w) for w, (a, b) in zip(weights, offsets, strict=True) if a < b)
    assert float(shared_out(offsets, weights, len(text)).sum()) == pytest.approx(kept)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_wrapper_lies_outside_and_is_as_important_as_its_neighbours(name: str) -> None:
    template = PromptTemplate(chunk_start="<doc start> ", chunk_end=" </doc end>")
    wrapped, before = template.wrap(TEXT), len(template.chunk_start)
    scores = torch.full((len(TEXT),), 0.25)
    scores[0], scores[-1] = 0.5, 0.75
    for tokenizer in both(name):
        ids = encode(tokenizer, wrapped)
        found = chunk_scores(tokenizer, template, TEXT, ids, scores)
        whole = token_offsets(tokenizer, wrapped, ids)
        front = [i for i, (_, stop) in enumerate(whole) if stop < before]
        back = [i for i, (start, _) in enumerate(whole) if start > before + len(TEXT)]
        assert {found[i].item() for i in front} == {0.5}
        assert {found[i].item() for i in back} == {0.75}
        spans = chunk_offsets(tokenizer, template, TEXT, ids)
        for (start, stop), (first, last) in zip(whole, spans, strict=True):
            # The characters of the wrapped text that lie in the chunk, counted from its first one.
            own = {place - before for place in range(start, stop)} & set(range(len(TEXT)))
            assert set(range(first, last)) == own


def test_gaps_take_what_follows() -> None:
    scores = highest([(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)], torch.tensor([0.5, 0.25]))
    assert scores.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25]
    assert highest([(0, 0)], torch.empty(0)).tolist() == [0.0]
    assert spread([(1, 2), (3, 4)], torch.tensor([0.1, 0.2]), 6).tolist() == pytest.approx(
        [0.1, 0.1, 0.2, 0.2, 0.2, 0.2]
    )
    assert within([(0, 3), (3, 8), (8, 9)], 2, 4) == [(0, 1), (1, 4), (4, 4)]


def test_ids_that_the_text_does_not_give_again_are_read_one_by_one() -> None:
    fast = byte_level()
    ids = [token for letter in TEXT for token in encode(fast, letter)]  # not what it would give
    assert ids != encode(fast, TEXT)
    assert token_offsets(fast, TEXT, ids) == [(i, i + 1) for i in range(len(TEXT))]


@pytest.mark.parametrize("name", ["byte level", "metaspace", "characters"])
def test_a_chunk_known_by_its_ids_alone_has_its_text(name: str) -> None:
    for tokenizer in both(name):
        ids = encode(tokenizer, f"<doc>{TEXT}</doc>\n")
        wrapped = PromptTemplate(chunk_start="<doc>", chunk_end="</doc>\n")
        assert chunk_text(tokenizer, wrapped, ids).strip() == TEXT
        assert chunk_text(tokenizer, BARE, ids) == f"<doc>{TEXT}</doc>\n"
        usual = PromptTemplate()
        assert chunk_text(tokenizer, usual, encode(tokenizer, usual.wrap(TEXT))).strip() == TEXT


def test_lower_case_words_without_accents_are_found_again() -> None:
    fast, text = word_pieces(), "GRÜN Café, the Straße"
    ids = encode(fast, text)
    assert fast.decode(ids) != text
    told, found = (token_offsets(one, text, ids) for one in (fast, WithoutOffsets(fast)))
    assert covered(found) >= {place for place, letter in enumerate(text) if not letter.isspace()}
    assert [text[slice(*one)].strip() for one in found] == [text[slice(*one)] for one in told]


def test_scores_must_fit_the_text() -> None:
    with pytest.raises(InvalidInputError, match="one per character"):
        chunk_scores(byte_level(), BARE, "ab", [1], torch.zeros(3))
    with pytest.raises(InvalidInputError, match="not a number"):
        chunk_scores(byte_level(), BARE, "a", [1], torch.tensor([torch.nan]))
