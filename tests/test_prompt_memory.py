"""A prompt that begins like one of the last ones starts behind that, with the same logits."""

from __future__ import annotations

import threading
from typing import Any

import access
import pytest
import torch
from laws import (
    LONG_QUESTION,
    QUESTION,
    TEXTS,
    TOLERANCE,
    TURNS,
    Recorder,
    error,
    make_engine,
)
from torch import Tensor
from zoo import FAMILIES, HYBRIDS, build, byte_tokenizer

from kvcache_rag import (
    Answer,
    BestFew,
    Engine,
    FullRecompute,
    InvalidInputError,
    MemoryStore,
    Reuse,
)
from kvcache_rag.policies import BestLast, CacheBlend

POLICIES = [FullRecompute(), Reuse(), BestFew(2), BestLast(0.5)]
OTHER = "Who was it, and when?"
STATES_TOLERANCE = 5e-4  # as in `test_hybrids`


def asked(engine: Engine, question: str, texts: list[str] = TEXTS, **options: Any) -> Answer:
    return engine.generate(question, texts, **{"max_new_tokens": 4, **options})


def steps(engine: Engine, question: str, texts: list[str] = TEXTS, **options: Any) -> Tensor:
    """Logits of an answer, `(tokens, vocabulary)`."""
    seen = Recorder()
    asked(engine, question, texts, logits_processor=[seen], **options)
    return torch.cat(seen.steps)


def alone(engine: Engine, question: str, texts: list[str] = TEXTS, **options: Any) -> Tensor:
    engine.forget_buffer()
    return steps(engine, question, texts, **options)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Engine:
    made: Engine = make_engine(request.param)
    return made


@pytest.fixture
def engine() -> Engine:
    made: Engine = make_engine("qwen2")
    return made


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_law_what_begins_alike_goes_on_alike(family: Engine, policy: Any) -> None:
    cases = [
        (QUESTION, {}),
        (OTHER, {}),
        (LONG_QUESTION, {"history": TURNS}),
        (OTHER, {"history": TURNS}),
    ]
    references = [alone(family, question, policy=policy, **more) for question, more in cases]
    family.forget_buffer()
    for (question, more), reference in zip(cases, references, strict=True):
        found = steps(family, question, policy=policy, **more)
        assert error(found, reference) < TOLERANCE
    again = asked(family, OTHER, policy=policy, history=TURNS).metrics
    whole = again.prompt_tokens - (0 if policy.is_full else again.prefix_tokens)
    assert again.continued_tokens == whole - again.reused_tokens - 1


Batch = list[tuple[str, list[str], list[dict[str, str]]]]

CHATS: Batch = [(OTHER, TEXTS, TURNS), (QUESTION, TEXTS[:2], []), (LONG_QUESTION, TEXTS, [])]


def together(engine: Engine, batch: Batch, policy: Any) -> tuple[Tensor, list[int]]:
    """Logits of a batch, `(steps, rows, vocabulary)`, and how far each row went on from another."""
    seen = Recorder()
    options = {"max_new_tokens": 4, "policy": policy, "logits_processor": [seen]}
    answers = engine.generate_batch(batch, **options)
    return torch.stack(seen.steps), [one.metrics.continued_tokens for one in answers]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_law_rows_of_a_batch_go_on_from_each_where_it_was_left(family: Engine, policy: Any) -> None:
    turned = [CHATS[2], CHATS[0], (OTHER, TEXTS[:2], [])]  # other rows, other padding
    reference, _ = together(family, turned, policy)  # what is missing is computed
    family.forget_buffer()
    reference, begun = together(family, turned, policy)
    assert begun == [0, 0, 0]
    family.forget_buffer()
    together(family, CHATS, policy)
    found, continued = together(family, turned, policy)
    assert error(found, reference) < TOLERANCE
    assert all(continued)
    # One at a time goes on from a row of a batch, and a batch from one.
    alone_again = asked(family, LONG_QUESTION, policy=policy).metrics
    assert alone_again.continued_tokens >= continued[0]
    found, continued = together(family, turned, policy)
    assert error(found, reference) < TOLERANCE
    assert continued[0] == alone_again.continued_tokens


def test_law_two_rows_go_on_from_one_prompt(engine: Engine) -> None:
    engine.add(TEXTS)
    longer: Batch = [(f"{QUESTION} {OTHER}", TEXTS, []), (LONG_QUESTION, TEXTS, [])]
    reference, _ = together(engine, longer, Reuse())
    engine.forget_buffer()
    asked(engine, QUESTION, policy=Reuse())
    found, continued = together(engine, longer, Reuse())
    assert continued[0] > continued[1]
    assert error(found, reference) < TOLERANCE


def test_rows_of_a_batch_stay_where_one_of_them_goes_on(engine: Engine) -> None:
    engine.add(TEXTS)
    for policy in (Reuse(), FullRecompute()):
        together(engine, CHATS, policy)
        for question, texts, history in (*CHATS, *CHATS):
            metrics = asked(engine, question, texts, history=history, policy=policy).metrics
            whole = metrics.query_tokens
            if policy.is_full:
                whole = metrics.prompt_tokens
            assert metrics.continued_tokens == whole - 1


@pytest.mark.parametrize("name", list(HYBRIDS))
def test_law_states_are_gone_on_from_where_they_are(name: str) -> None:
    engine = make_engine(name)
    # Its prompt begins with all of the first one's.
    longer = f"{QUESTION}\nAnswer: it was.\n{OTHER}"
    for policy in (Reuse(), FullRecompute()):
        reference = alone(engine, longer, policy=policy)
        engine.forget_buffer()
        before = asked(engine, QUESTION, policy=policy, max_new_tokens=1).metrics
        metrics = asked(engine, longer, policy=policy, max_new_tokens=1).metrics
        known = before.prompt_tokens if policy.is_full else before.query_tokens
        has_attention = bool(engine._bound.model.measured.groups)
        is_continued = has_attention or not policy.is_full
        assert metrics.continued_tokens == (known if is_continued else 0)
        asked(engine, QUESTION, policy=policy, max_new_tokens=1)
        assert error(steps(engine, longer, policy=policy), reference) < STATES_TOLERANCE
        # Of all or of nothing: the state of where they part is nowhere.
        assert asked(engine, OTHER, policy=policy).metrics.continued_tokens == 0


@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3_5", "falcon_h1"])
def test_law_behind_chunks_that_lie_elsewhere(name: str) -> None:
    engine = make_engine(name, rotation="deferred")
    engine.add(TEXTS)
    longer = f"{QUESTION}\nAnswer: it was.\n{OTHER}"
    reference = alone(engine, longer, policy=Reuse())
    first = asked(engine, QUESTION, policy=Reuse(), max_new_tokens=1).metrics
    assert first.rotation == "deferred"
    assert error(steps(engine, longer, policy=Reuse()), reference) < STATES_TOLERANCE
    asked(engine, QUESTION, policy=Reuse(), max_new_tokens=1)
    metrics = asked(engine, longer, policy=Reuse()).metrics
    assert metrics.continued_tokens == first.query_tokens
    assert asked(engine, longer, TEXTS[::-1], policy=Reuse()).metrics.continued_tokens == 0


def test_law_it_would_notice_other_keys(engine: Engine) -> None:
    reference = alone(engine, OTHER, policy=Reuse())
    asked(engine, QUESTION, policy=Reuse())
    kept = access.runner(engine).memory.kept
    assert kept is not None
    for tensors in kept.tensors:
        for tensor in tensors:
            tensor.mul_(1.5)
    assert error(steps(engine, OTHER, policy=Reuse()), reference) > 10 * TOLERANCE


def test_a_chat_computes_its_new_tokens_only(engine: Engine) -> None:
    turns: list[dict[str, str]] = []
    for number in range(6):
        question = f"And number {number}?"
        metrics = asked(engine, question, history=turns, policy=Reuse()).metrics
        turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"It was {number}."},
        ]
        new = metrics.query_tokens - metrics.continued_tokens
        assert not number or new < 80
    assert metrics.query_tokens > 200


def test_what_is_left_is_not_gone_on_from_where_it_is_something_else(engine: Engine) -> None:
    def continued(*texts: str, **options: Any) -> int:
        asked(engine, QUESTION, policy=Reuse())
        asked(engine, QUESTION, policy=Reuse())  # nothing is missing now
        options = {"policy": Reuse(), **options}
        return asked(engine, OTHER, [*texts], **options).metrics.continued_tokens

    assert continued(*TEXTS) > 0
    assert continued(*TEXTS[::-1]) == 0
    assert continued(*TEXTS[:2]) == 0
    assert continued(*TEXTS, policy=FullRecompute()) == 0
    assert continued(*TEXTS, policy=Reuse(positions="composite")) == 0
    assert continued(*TEXTS, policy=CacheBlend(0.5)) == 0
    assert continued(*TEXTS, num_beams=2) == 0


def test_deleted_chunks_are_computed_again(engine: Engine) -> None:
    keys = engine.add(TEXTS)
    asked(engine, QUESTION, policy=Reuse())
    engine.delete(keys[:1])
    metrics = asked(engine, QUESTION, policy=Reuse()).metrics
    assert (metrics.continued_tokens, metrics.misses) == (0, 1)
    engine.delete_namespace()
    assert access.runner(engine).memory.kept is None


@pytest.mark.parametrize(
    ("texts", "policy", "in_batch"),
    [
        (TEXTS, Reuse(), False),
        (TEXTS, FullRecompute(), False),
        ([], Reuse(), False),
        ([], Reuse(), True),
    ],
    ids=["reuse", "full", "none", "batch"],
)
def test_law_prompts_are_their_tenants_and_their_weights(
    engine: Engine, texts: list[str], policy: Any, in_batch: bool
) -> None:
    def ask(one: Engine, question: str) -> int:
        if in_batch:
            batch = one.generate_batch([(question, texts), (question, TEXTS)], policy=policy)
            return batch[0].metrics.continued_tokens
        return asked(one, question, texts, policy=policy).metrics.continued_tokens

    engine.add(TEXTS)
    ask(engine, QUESTION)
    assert ask(engine, QUESTION) > 0
    assert ask(engine.in_namespace("other"), QUESTION) == 0
    ask(engine, QUESTION)
    with torch.no_grad():
        next(iter(engine.model.parameters())).add_(0.5)
    assert ask(engine, QUESTION) == 0
    reference = alone(engine, OTHER, texts, policy=policy)
    ask(engine, QUESTION)
    assert error(steps(engine, OTHER, texts, policy=policy), reference) < TOLERANCE


def test_tenants_have_one_memory_and_none_goes_on_from_another(engine: Engine) -> None:
    engine = make_engine("qwen2", prompt_memory=1 << 30)
    tenants = [engine, engine.in_namespace("other")]
    assert access.runner(tenants[1]).memory is access.runner(engine).memory
    for policy in (Reuse(), FullRecompute()):
        first = [asked(one, QUESTION, policy=policy).metrics for one in tenants]
        assert [one.continued_tokens for one in first] == [0, 0]
        # Nor is the first one's pushed out by a prompt that is stopped.
        cancelled = threading.Event()
        cancelled.set()
        asked(tenants[1], OTHER, policy=policy, cancelled=cancelled)
        again = [asked(one, QUESTION, policy=policy).metrics for one in tenants]
        assert all(one.continued_tokens for one in again)


def test_an_answer_that_was_cancelled_leaves_what_it_had(engine: Engine) -> None:
    cancelled = threading.Event()
    engine.add(TEXTS)
    stream = engine.stream(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=40)
    next(stream)
    stream.close()
    assert asked(engine, QUESTION, policy=Reuse()).metrics.continued_tokens > 0
    reference = alone(engine, OTHER, policy=Reuse())
    cancelled.set()
    engine.forget_buffer()
    asked(engine, QUESTION, policy=Reuse(), cancelled=cancelled)  # before its first token
    assert error(steps(engine, OTHER, policy=Reuse()), reference) < TOLERANCE


def test_a_mistake_of_one_leaves_what_others_go_on_from() -> None:
    engine = make_engine("qwen2", prompt_memory=1 << 30)
    engine.add(TEXTS)
    asked(engine, QUESTION, policy=Reuse())
    with pytest.raises(InvalidInputError):
        asked(engine, QUESTION, TEXTS[::-1], policy=Reuse(), sequence_bias={(10**6,): 1.0})
    assert asked(engine, OTHER, policy=Reuse()).metrics.continued_tokens > 0
    assert error(steps(engine, OTHER, policy=Reuse()), alone(engine, OTHER, policy=Reuse())) < (
        TOLERANCE
    )


def test_sampled_answers(engine: Engine) -> None:
    engine.add(TEXTS)
    reference = alone(engine, OTHER, policy=Reuse())
    torch.manual_seed(3)
    asked(engine, QUESTION, policy=Reuse(), do_sample=True, temperature=1.5, max_new_tokens=9)
    assert error(steps(engine, OTHER, policy=Reuse()), reference) < TOLERANCE


def test_a_prompt_that_is_longer_than_its_buffer_takes_its_beginning_along(engine: Engine) -> None:
    engine.add(TEXTS)
    long = "Who was it? " * 40
    reference = alone(engine, f"{QUESTION} {long}", policy=Reuse())
    engine.forget_buffer()
    asked(engine, QUESTION, policy=Reuse())
    small = access.runner(engine).memory.kept
    found = steps(engine, f"{QUESTION} {long}", policy=Reuse())
    assert access.runner(engine).memory.kept is not small
    assert error(found, reference) < TOLERANCE


def test_several_prompts_as_far_as_there_is_memory() -> None:
    lists = [TEXTS[:2], TEXTS[1:], TEXTS[::-1]]

    def continued(limit: int | None) -> list[bool]:
        engine = make_engine("qwen2", prompt_memory=limit)
        engine.add(TEXTS)
        for texts in lists * 2:
            found = [asked(engine, OTHER, texts, policy=Reuse()).metrics for texts in lists]
        return [one.continued_tokens > 0 for one in found]

    assert continued(None) == [False] * 3
    assert continued(0) == [False] * 3
    assert continued(1 << 30) == [True] * 3
    engine = make_engine("qwen2", prompt_memory=0)
    asked(engine, OTHER, policy=Reuse())
    assert asked(engine, OTHER, policy=Reuse()).metrics.continued_tokens == 0
    with pytest.raises(InvalidInputError, match="prompt_memory must be a number of bytes"):
        make_engine("qwen2", prompt_memory=-1)


def test_a_prompt_with_another_end_keeps_the_first_one_where_there_is_memory() -> None:
    engine = make_engine("qwen2", prompt_memory=1 << 30)
    engine.add(TEXTS)
    other = "Where? " * 60
    for question in (f"{QUESTION} {'x ' * 200}", other, f"{QUESTION} {'x ' * 200}"):
        metrics = asked(engine, question, policy=Reuse()).metrics
    assert metrics.continued_tokens == metrics.query_tokens - 1


def test_rounded_chunks_are_gone_on_from_as_they_were_loaded() -> None:
    engine = Engine(
        build("qwen2"), byte_tokenizer(), store=MemoryStore(codec="int8"), rotation="copied"
    )
    first = asked(engine, QUESTION, policy=Reuse()).metrics
    assert first.misses == len(TEXTS)
    assert asked(engine, QUESTION, policy=Reuse()).metrics.continued_tokens == 0
    assert asked(engine, QUESTION, policy=Reuse()).metrics.continued_tokens > 0
