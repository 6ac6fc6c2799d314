"""Prompts that do not fit: refuse, drop the lowest, or answer in rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zoo import build, byte_tokenizer

from kvcache_rag import (
    BestFew,
    BestLast,
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    InvalidInputError,
    MemoryStore,
    Metrics,
    PromptTemplate,
    Reuse,
)
from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.generation import StoredChunk
from kvcache_rag.generation.request import split_rounds

if TYPE_CHECKING:
    from pathlib import Path

SIZES = st.lists(st.integers(1, 40), max_size=12)
ROOM = st.integers(0, 120)
TEMPLATE = PromptTemplate(
    system="Read.\n", chunk_start="", chunk_end="\n", refine="{question} Before: {answer}"
)
CHUNK = 40  # tokens, the line break included
NEW = 8


@given(SIZES, ROOM, ROOM)
def test_what_fits_is_one_round_whatever_the_mode(sizes: list[int], room: int, later: int) -> None:
    for mode in ("error", "drop_lowest", "refine"):
        if sum(sizes) <= room:
            found = split_rounds(sizes, room=room, later_room=later, overflow=mode)
            assert found == [list(range(len(sizes)))]


@given(SIZES, ROOM)
def test_error_refuses_exactly_what_does_not_fit(sizes: list[int], room: int) -> None:
    if sum(sizes) > room:
        with pytest.raises(ContextTooLongError, match=rf"have {sum(sizes)} tokens .* for {room};"):
            split_rounds(sizes, room=room, later_room=room, overflow="error")


@given(SIZES, ROOM)
def test_drop_lowest_keeps_the_longest_beginning_that_fits(sizes: list[int], room: int) -> None:
    if sizes and sizes[0] > room:
        with pytest.raises(ContextTooLongError, match="chunk 0"):
            split_rounds(sizes, room=room, later_room=0, overflow="drop_lowest")
        return
    (kept,) = split_rounds(sizes, room=room, later_room=0, overflow="drop_lowest")
    assert kept == list(range(len(kept)))
    assert sum(sizes[: len(kept)]) <= room
    assert len(kept) == len(sizes) or sum(sizes[: len(kept) + 1]) > room


@given(SIZES, ROOM, ROOM)
def test_refine_keeps_every_chunk_once_in_order_and_every_round_fits(
    sizes: list[int], room: int, later: int
) -> None:
    largest = max(sizes, default=0)
    if largest > min(room, later):
        return
    rounds = split_rounds(sizes, room=room, later_room=later, overflow="refine")
    assert [index for one in rounds for index in one] == list(range(len(sizes)))
    assert rounds
    for number, one in enumerate(rounds):
        space = later if number else room
        used = sum(sizes[index] for index in one)
        assert used <= space
        if number + 1 < len(rounds):
            assert used + sizes[rounds[number + 1][0]] > space, "a round was left half empty"


@given(SIZES, st.integers(-50, -1))
def test_a_question_that_does_not_fit_is_refused_in_every_mode(sizes: list[int], room: int) -> None:
    for mode in ("error", "drop_lowest", "refine"):
        with pytest.raises(ContextTooLongError, match=rf"alone are {-room} tokens over"):
            split_rounds(sizes, room=room, later_room=room, overflow=mode)


def test_refine_names_the_chunk_that_fits_no_round() -> None:
    with pytest.raises(ContextTooLongError, match=r"chunk 2 has 30 tokens .* room for 25"):
        split_rounds([5, 5, 30], room=20, later_room=25, overflow="refine")


def test_a_chunk_may_need_the_larger_room_of_the_first_round() -> None:
    assert split_rounds([18, 5], room=20, later_room=10, overflow="refine") == [[0], [1]]


def make_engine(window: int | None = None) -> Engine:
    return Engine(build("qwen2"), byte_tokenizer(), template=TEMPLATE, context_window=window)


@pytest.fixture(scope="module")
def small() -> Engine:
    """Room for three chunks in the first round and two in later ones."""
    probe = make_engine()
    query = len(probe.tokenize("Who?").query)
    return make_engine(len(probe.tokenize("").prefix) + query + NEW + 3 * CHUNK)


def texts(count: int) -> list[str]:
    return [chr(ord("a") + index) * (CHUNK - 1) for index in range(count)]


def test_the_error_says_what_to_do(small: Engine) -> None:
    assert small.generate("Who?", texts(3), max_new_tokens=NEW).metrics.dropped_chunks == 0
    with pytest.raises(ContextTooLongError, match=r"room for 120; .* overflow=\"drop_lowest\""):
        small.generate("Who?", texts(4), max_new_tokens=NEW)
    with pytest.raises(ContextTooLongError, match="room for 119"):
        small.generate("Who?", texts(3), max_new_tokens=NEW + 1)


def test_dropped_chunks_are_counted_and_nothing_of_them_is_used(small: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "overflow": "drop_lowest"}
    answer = small.generate("Who?", texts(5), **options)
    assert answer.metrics.dropped_chunks == 2
    assert answer.metrics.reused_tokens + answer.metrics.prefilled_tokens == 3 * CHUNK
    assert answer.token_ids == small.generate("Who?", texts(3), max_new_tokens=NEW).token_ids
    batch = small.generate_batch([("Who?", texts(5)), ("Who?", texts(1))], **options)
    assert [one.metrics.dropped_chunks for one in batch] == [2, 0]
    assert batch[0].token_ids == answer.token_ids


def test_a_chunk_that_was_measured_anew_is_missed_for_its_other_text(small: Engine) -> None:
    (key,) = small.add(texts(1))
    given = [StoredChunk(key, "y" * 30), *texts(6)[1:]]
    options: dict[str, Any] = {"max_new_tokens": NEW, "overflow": "drop_lowest"}
    missed = small.generate("Who?", given, policy=Reuse(), **options).metrics.missed
    assert [one.reason for one in missed if one.chunk == 0] == ["other text"]


def test_refine_reads_every_chunk_and_streams_the_last_round_only(small: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "overflow": "refine"}
    answer = small.generate("Who?", texts(6), **options)
    metrics = answer.metrics
    assert metrics.rounds >= 3
    assert metrics.dropped_chunks == 0
    assert metrics.reused_tokens + metrics.prefilled_tokens == 6 * CHUNK
    assert sum(metrics.hits.values()) + metrics.misses == 6
    assert metrics.total >= metrics.ttft >= metrics.load + metrics.stitch + metrics.prefill
    again = small.stream("Who?", texts(6), **options)
    assert "".join(again) == again.text == answer.text
    assert again.metrics.rounds == metrics.rounds
    assert (again.metrics.reused_tokens, again.metrics.misses) == (6 * CHUNK, 0)


def test_each_round_of_refine_is_a_prompt_of_its_own(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    answers = access.runner(small).answers

    def watched(prompts: Any, *rest: Any) -> Any:
        found = answers(prompts, *rest)
        seen.extend(zip(prompts, found, strict=True))
        return found

    monkeypatch.setattr(access.runner(small), "answers", watched)
    final = small.generate("Who?", texts(6), max_new_tokens=NEW, overflow="refine")
    assert final.metrics.rounds == len(seen)
    decoded = [small.tokenizer.decode(list(prompt.query)) for prompt, _ in seen]
    assert "Before:" not in decoded[0]
    for number in range(1, len(seen)):
        assert f"Before: {seen[number - 1][1].text}" in decoded[number]
    assert final.text == seen[-1][1].text
    for name in ("query_tokens", "generated_tokens", "reused_tokens", "misses", "prompt_tokens"):
        parts = [getattr(answer.metrics, name) for _, answer in seen]
        assert getattr(final.metrics, name) == sum(parts), name


def test_a_batch_has_no_rounds(small: Engine) -> None:
    with pytest.raises(InvalidInputError, match="several rounds; use generate"):
        small.generate_batch([("Who?", texts(6))], max_new_tokens=NEW, overflow="refine")
    fits = small.generate_batch([("Who?", texts(2))], max_new_tokens=NEW, overflow="refine")
    assert fits[0].metrics.rounds == 1


@pytest.mark.parametrize("mode", ["error", "drop_lowest", "refine"])
def test_a_chunk_longer_than_the_window_is_named(small: Engine, mode: str) -> None:
    given = [*texts(1), "x" * 500]
    if mode == "drop_lowest":
        answer = small.generate("Who?", given, overflow=mode, max_new_tokens=NEW)
        assert answer.metrics.dropped_chunks == 1
        given = given[::-1]  # the best one is not left out in silence
        with pytest.raises(ContextTooLongError, match=r"chunk 0 has 501 tokens .* split it"):
            small.generate("Who?", given, overflow=mode)
        return
    with pytest.raises(ContextTooLongError, match=r"chunk 1 has 501 tokens .* split it"):
        small.generate("Who?", given, overflow=mode)
    before = small.store.stats().puts
    with pytest.raises(ContextTooLongError, match="chunk 1 has 501 tokens"):
        small.add(given)
    assert small.store.stats().puts == before, "nothing is computed when one of them cannot be"


def test_a_chunk_longer_than_the_models_own_window_is_refused_without_one_of_ours() -> None:
    engine = make_engine()
    assert engine.context_window == 2048
    with pytest.raises(ContextTooLongError, match="chunk 0 has 3001 tokens"):
        engine.generate("Who?", ["x" * 3000], policy=Reuse())


@pytest.mark.parametrize("mode", ["error", "drop_lowest", "refine"])
def test_a_question_longer_than_the_window_is_refused(small: Engine, mode: str) -> None:
    with pytest.raises(ContextTooLongError, match="shorten the question or the history, or lower"):
        small.generate("Who? " * 60, texts(1), overflow=mode, max_new_tokens=NEW)
    with pytest.raises(ContextTooLongError, match="shorten it or lower max_new_tokens"):
        small.complete("Who? " * 60)
    with pytest.raises(ContextTooLongError, match="alone are"):
        small.generate("Who?", [], overflow=mode, max_new_tokens=500)


def test_drop_lowest_goes_by_score_where_the_order_says_nothing() -> None:
    sizes, scores = [10, 10, 10, 10], [0.9, 0.1, 0.2, 0.8]
    kept = split_rounds(sizes, room=30, later_room=0, overflow="drop_lowest", scores=scores)
    assert kept == [[0, 2, 3]]


class Forced:
    """A logits processor that lets nothing but these tokens be said, one after the other."""

    def __init__(self, tokens: list[int]) -> None:
        self.left = tokens.copy()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = torch.tensor([self.left.pop(0)])
        return torch.full_like(scores, -1e9).index_fill_(1, wanted, 0.0)


@pytest.mark.parametrize("plain", [True, False])
def test_an_answer_ends_before_a_marker_of_documents(plain: bool) -> None:
    """What a model says is made to be a marker; it is neither in the text nor in a stream of it."""
    said = "".join(map(chr, range(97, 123)))
    engine = Engine(build("llama"), byte_tokenizer(), template=PromptTemplate(system="Read.\n"))
    ids = engine.tokenize_text(f"{said}\nDocument: more")
    forced = [token for token in ids if token != byte_tokenizer().bos_token_id]
    options: dict[str, Any] = {"max_new_tokens": len(forced), "policy": Reuse()}
    options["logits_processor"] = [Forced(forced)]
    if plain:
        answer = engine.generate("Who?", ["It is.", "It was."], **options)
        assert (answer.text, answer.finish_reason) == (said, "stop")
    else:
        assert "".join(engine.stream("Who?", ["It is.", "It was."], **options)) == said


@pytest.mark.parametrize("tokens", [-3, 0, 1, CHUNK - 1, CHUNK + 1, 10**6])
@pytest.mark.parametrize("rotation", ["copied", "deferred"])
def test_law_what_a_reference_says_of_a_length_changes_no_answer(
    tmp_path: Path, tokens: int, rotation: Any
) -> None:
    """Whatever a row has beside its text is a hint: nothing is refused, lost or put aside."""
    store = DiskStore(tmp_path)
    engine = Engine(
        build("llama"), byte_tokenizer(), template=TEMPLATE, store=store, rotation=rotation
    )
    texts = [letter * (CHUNK - 1) for letter in "abc"]
    keys = engine.add(texts)
    expected = engine.generate("Which?", texts, max_new_tokens=NEW)
    rows = [StoredChunk(key, text=text) for key, text in zip(keys, texts, strict=True)]
    rows[1] = StoredChunk(replace(keys[1], tokens=tokens), text=texts[1])
    found = engine.generate("Which?", rows, max_new_tokens=NEW)
    assert found.token_ids == expected.token_ids
    assert found.metrics.prompt_tokens == expected.metrics.prompt_tokens
    assert found.metrics.prefilled_tokens == 0, "its chunk is found by its text"
    assert all(map(store.contains, keys))
    assert store.stats().corrupt == 0


@pytest.mark.parametrize(
    "policy", [Reuse(), BestLast(), BestFew(12), FullRecompute(), Combination()], ids=repr
)
@pytest.mark.parametrize("overflow", ["error", "drop_lowest", "refine"])
def test_law_references_that_say_too_little_are_treated_as_overflow_says(
    tmp_path: Path, overflow: Any, policy: Any
) -> None:
    """Twenty chunks that each claim to be one token long: what their texts would get, they get."""
    options: dict[str, Any] = {"template": TEMPLATE, "store": DiskStore(tmp_path)}
    engine = Engine(build("llama"), byte_tokenizer(), context_window=400, **options)
    texts = [letter * (CHUNK - 1) for letter in "abcdefghijklmnopqrst"]
    keys = engine.add(texts)
    pairs = zip(keys, texts, strict=True)
    rows = [StoredChunk(replace(key, tokens=1), text=text) for key, text in pairs]
    options = {"overflow": overflow, "max_new_tokens": NEW, "policy": policy}

    both = [("Which?", rows), ("Who?", texts[:1])]
    if overflow == "error":
        for ask in (
            lambda: engine.generate("Which?", rows, **options),
            lambda: "".join(engine.stream("Which?", rows, **options)),
            lambda: engine.logits("Which?", rows, policy=policy),
            lambda: engine.explain("Which?", rows, policy=policy),
            lambda: engine.generate_batch(both, **options),
        ):
            with pytest.raises(ContextTooLongError, match=r"the chunks have \d+ tokens"):
                ask()
        return
    engine.generate("Which?", texts, **options)  # combinations are computed now
    expected = engine.generate("Which?", texts, **options)
    assert expected.metrics.rounds > 1 or expected.metrics.dropped_chunks
    found = engine.generate("Which?", rows, **options)
    stream = engine.stream("Which?", rows, **options)
    assert (found.token_ids, "".join(stream)) == (expected.token_ids, expected.text)
    for metrics in (found.metrics, stream.metrics):
        for name in ("prompt_tokens", "rounds", "dropped_chunks", "prefilled_tokens"):
            assert getattr(metrics, name) == getattr(expected.metrics, name)
    if overflow == "drop_lowest":
        assert engine.generate_batch(both, **options)[0].token_ids == expected.token_ids


# ---------------------------------------------------------------------- what is answered from
def few(count: int, **options: Any) -> dict[str, Any]:
    """Options of an answer from the best chunks: nothing of the texts is in the question."""
    return {"max_new_tokens": NEW, "policy": BestFew(count), **options}


TOO_LONG = "x" * 500


@pytest.mark.parametrize("mode", ["error", "drop_lowest", "refine"])
def test_only_what_is_answered_from_has_to_fit(small: Engine, mode: Any) -> None:
    expected = small.generate("Who?", texts(2), **few(2))
    for others in (texts(9)[2:], [TOO_LONG] * 3):
        found = small.generate("Who?", [*texts(2), *others], **few(2, overflow=mode))
        assert found.token_ids == expected.token_ids
        assert found.metrics.rounds == 1
        assert found.metrics.dropped_chunks == 0
        assert found.metrics.unused_chunks == len(others)
        assert found.metrics.prompt_tokens == expected.metrics.prompt_tokens


def test_error_refuses_a_chosen_chunk_that_is_too_long(small: Engine) -> None:
    chunks = [*texts(1), TOO_LONG, *texts(3)[1:]]
    for ask in (small.generate, small.logits, small.explain):
        with pytest.raises(ContextTooLongError, match="chunk 1 has 501 tokens"):
            ask("Who?", chunks, policy=BestFew(2))
    assert small.generate("Who?", chunks, **few(1)).metrics.answered_from == (0,)
    with pytest.raises(ContextTooLongError, match="the chunks have 160 tokens"):
        small.generate("Who?", texts(5), **few(4))


@pytest.mark.parametrize("mode", ["drop_lowest", "refine"])
def test_in_place_of_a_chosen_chunk_that_does_not_fit_the_next_one_is_taken(
    small: Engine, mode: Any
) -> None:
    letters = texts(3)
    for chunks, answered in (
        ([TOO_LONG, *letters], (1, 2)),
        ([letters[0], TOO_LONG, *letters[1:]], (0, 2)),
        ([letters[0], TOO_LONG, TOO_LONG, letters[1]], (0, 3)),
        ([*letters, TOO_LONG], (0, 1)),
    ):
        metrics = small.generate("Who?", chunks, **few(2, overflow=mode)).metrics
        assert metrics.answered_from == answered
        assert metrics.dropped_chunks == answered[1] - 1  # as many as were too long before it
        assert metrics.unused_chunks == len(chunks) - 2 - metrics.dropped_chunks
        assert (
            metrics.prompt_tokens
            == small.generate("Who?", letters[:2], **few(2)).metrics.prompt_tokens
        )
    by_score = small.generate(
        "Who?", [*letters, TOO_LONG], **few(2, overflow=mode, scores=[1, 3, 2, 4])
    ).metrics
    assert (by_score.answered_from, by_score.dropped_chunks) == ((1, 2), 1)
    # Fewer than were chosen, where no more fit; and none that fits is named.
    less = small.generate("Who?", texts(6), **few(5, overflow=mode)).metrics
    assert (less.answered_from, less.dropped_chunks, less.unused_chunks) == ((0, 1, 2), 3, 0)
    with pytest.raises(ContextTooLongError, match="chunk 0 has 501 tokens"):
        small.generate("Who?", [TOO_LONG, TOO_LONG], **few(1, overflow=mode))
    with pytest.raises(ContextTooLongError, match="shorten the question or the history"):
        small.generate("Who? " * 60, letters, **few(2, overflow=mode))


def test_a_batch_of_the_best_few_that_do_not_all_fit(small: Engine) -> None:
    asked: list[Any] = [("Who?", [TOO_LONG, *texts(3)]), ("What?", texts(1)), ("x", [])]
    options = few(2, overflow="drop_lowest")
    batch = small.generate_batch(asked, **options)
    alone = [small.generate(*one, **options) for one in asked]
    assert [one.token_ids for one in batch] == [one.token_ids for one in alone]
    assert [one.metrics.dropped_chunks for one in batch] == [1, 0, 0]
    assert [one.metrics.answered_from for one in batch] == [(1, 2), (0,), ()]
    assert [one.metrics.unused_chunks for one in batch] == [1, 0, 0]
    # There is one round, so that a batch may ask for several.
    assert small.generate_batch([("Who?", texts(6))], **few(2, overflow="refine"))


def test_numbers_of_what_is_answered_from_are_those_that_were_given(small: Engine) -> None:
    def answered(chunks: list[str], policy: Any, **options: Any) -> tuple[int, ...]:
        metrics = small.generate(
            "Who?", chunks, **{"policy": policy, "max_new_tokens": NEW, **options}
        ).metrics
        assert Metrics.from_dict(metrics.to_dict()) == metrics
        return metrics.answered_from

    scores = (0.5, 2.0, 1.0)
    for policy in (Reuse(), FullRecompute(), Combination()):
        assert answered(texts(3), policy) == answered(texts(3), policy, scores=scores) == (0, 1, 2)
        assert answered([], policy) == ()
        dropping = {"overflow": "drop_lowest"}
        assert answered(texts(5), policy, **dropping) == (0, 1, 2)
        kept = answered(texts(5), policy, scores=(1, 5, 2, 3, 4), **dropping)
        assert kept == (1, 3, 4)
        assert answered(texts(6), policy, overflow="refine") == (0, 1, 2, 3, 4, 5)
    assert answered(texts(3), BestLast()) == (1, 2, 0)
    assert answered(texts(3), BestLast(), scores=scores) == (0, 2, 1)
    assert answered(texts(3), BestLast(0.6)) == (2, 1, 0)
    several = answered(texts(6), BestLast(), overflow="refine")
    assert several[:3] == (1, 2, 0)
    assert sorted(several) == [*range(6)]
    assert answered(texts(5), BestLast(), overflow="drop_lowest") == (1, 2, 0)
    for count in (1, 2, 3):
        assert answered(texts(5), BestFew(count)) == (0, 1, 2)[:count]
        assert answered(texts(3), BestFew(count), scores=scores) == (1, 2, 0)[:count]
    assert small.complete("Who", max_new_tokens=1).metrics.answered_from == ()


def test_what_is_not_answered_from_is_neither_read_nor_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    keys = engine.add(texts(4))
    rows = [StoredChunk(key, text) for key, text in zip(keys, texts(4), strict=True)]
    encoded: list[Any] = []
    looked_up: list[Any] = []

    def watch(owner: Any, name: str, seen: list[Any]) -> None:
        real = getattr(owner, name)

        def watched(self: Any, asked: Any, *more: Any, **options: Any) -> Any:
            seen.append(asked)
            return real(self, asked, *more, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(type(access.renderer(engine)), "chunk_ids", encoded)
    watch(MemoryStore, "contains", looked_up)
    watch(MemoryStore, "get", looked_up)
    for mode in ("error", "drop_lowest"):
        for chunks in (rows, texts(4), keys):
            engine.generate("Who?", chunks, **few(2, overflow=mode))
            engine.generate("Who?", chunks, **few(2, overflow=mode, scores=[1, 4, 3, 2]))
            engine.needed(chunks, BestFew(2), question="Who?")
    assert not {*encoded} - {*texts(3)}
    assert not {*looked_up} - {*keys[:3]}
    assert {*texts(2)} <= {*encoded}
    assert {*keys[:2]} <= {*looked_up}, "what is answered from is counted here"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("  ", "chunk 3 is empty; leave it out"),
        ("", "chunk 3 is empty; leave it out"),
        (5, "chunk 3 is a int; give a text, ChunkKey or StoredChunk"),
        (None, "chunk 3 is a NoneType; give a text"),
        (["a"], "chunk 3 is a list; give a text"),
    ],
)
@pytest.mark.parametrize("mode", ["error", "drop_lowest", "refine"])
def test_what_is_no_chunk_is_refused_also_if_it_is_not_answered_from(
    small: Engine, mode: Any, wrong: Any, said: str
) -> None:
    chunks = [*texts(3), wrong]
    with pytest.raises(InvalidInputError, match=said):
        small.generate("Who?", chunks, **few(1, overflow=mode))
    with pytest.raises(InvalidInputError, match=said):
        small.needed(chunks, BestFew(1), question="Who?")
    with pytest.raises(InvalidInputError, match=said):
        small.explain("Who?", chunks, policy=BestFew(1))


def test_one_chunk_is_needed_by_words_and_scores() -> None:
    engine = make_engine()
    chunks = ["Bananas are sweet.", "The bridge of Torgau.", "Apples are, too."]
    keys = engine.keys(chunks)
    asked = "Where is the bridge of Torgau?"
    for policy in (BestFew(), BestFew(1), BestFew(3)):
        assert engine.needed(chunks, policy, question=asked) == [keys[1]]
        assert engine.needed(chunks, policy) == [keys[0]]
        assert engine.needed(chunks, policy, (0.0, 0.1, 5.0)) == [keys[2]]
        assert engine.needed([], policy, question=asked) == []
        answer = engine.generate(asked, chunks, policy=policy, max_new_tokens=1)
        assert answer.metrics.answered_from[0] == 1
        assert engine.store.contains(keys[1])
    assert not engine.store.contains(keys[0])
    assert not engine.store.contains(keys[2])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("scores", [None, (1.0, 3.0, 2.0, 0.0, 0.5, 0.1)])
def test_what_is_explained_is_what_is_answered(small: Engine, count: int, scores: Any) -> None:
    chunks = texts(6)
    for _ in range(2):  # by the second time all chunks are there
        metrics = small.generate("Who?", chunks, **few(count, scores=scores)).metrics
    told = small.explain("Who?", chunks, policy=BestFew(count), scores=scores)
    ids = small.tokenize("Who?", [chunks[index] for index in metrics.answered_from])
    assert tuple(token.id for token in told.tokens) == tuple(ids.all)
    for name in ("policy", "reused_tokens", "fresh_tokens", "query_tokens", "recomputed_tokens"):
        assert getattr(metrics, name) == getattr(told, name), name
    assert [span.kind for span in told.spans] == ["prefix", *["chunk"] * count, "query"]
    assert [bool(span.tier) for span in told.spans[1:-1]] == [True, *[False] * (count - 1)]


# ---------------------------------------------------------------------- rounds that are too small
def test_refine_whose_later_rounds_have_no_room_says_so() -> None:
    wordy = PromptTemplate(system="Read this.\n", chunk_start="<d>", chunk_end="</d>")
    engine = Engine(build("qwen2"), byte_tokenizer(), template=wordy, context_window=120)
    asked, chunks = "What is it they saw?", ["a" * 20] * 3
    with pytest.raises(ContextTooLongError, match=r"a later round, .* is \d+ tokens over"):
        engine.generate(asked, chunks, max_new_tokens=20, overflow="refine")


def test_refine_never_exceeds_the_window(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[int] = []
    answers = access.runner(small).answers

    def watched(prompts: Any, *rest: Any) -> Any:
        (prompt,), (answer,) = prompts, answers(prompts, *rest)
        parts = (access.renderer(small).prefix_ids, *prompt.chunks, prompt.query)
        longest.append(sum(map(len, parts)) + prompt.request.max_new_tokens)
        return [replace(answer, text="\ufffd" * NEW)]  # tokens that decode to three each

    monkeypatch.setattr(access.runner(small), "answers", watched)
    small.generate("Who?", ["a" * 30] * 9, max_new_tokens=NEW, overflow="refine")
    assert len(longest) > 2
    assert max(longest) <= small.context_window
