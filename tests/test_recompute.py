"""Computing chosen tokens again: what it costs, what it touches, and every way to generate."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import access
import pytest
import torch
from laws import (
    LONG_QUESTION,
    QUESTION,
    TEMPLATE,
    TEXTS,
    Picked,
    error,
    looking,
    make_engine,
    plain_logits,
)
from torch import Tensor
from zoo import build, byte_tokenizer

from kvcache_rag import DiskStore, Engine, FullRecompute, InvalidInputError, MemoryStore
from kvcache_rag.codecs import Int8
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.generation.context import Prompt
from kvcache_rag.generation.question import Question
from kvcache_rag.policies.cacheblend import CacheBlend
from kvcache_rag.policies.legolink import LegoLink
from kvcache_rag.policies.selection import candidates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitching.stitch import StitchedPrompt


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine("qwen2 window")


def all_that_may_be(prompt: StitchedPrompt, _: Signals) -> Tensor:
    return candidates(prompt)


@pytest.fixture(params=["reordered", "composite"])
def behind(request: pytest.FixtureRequest) -> Picked:
    """Selects everything behind the first chunk, so the answer is that of a full prefill."""
    return Picked(all_that_may_be, request.param)


# ---------------------------------------------------------------------- every way to generate
def test_beams_stop_strings_and_processors_see_a_full_prompt(
    engine: Engine, behind: Picked
) -> None:
    first = engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=12).text
    for options in (
        {"num_beams": 3},
        {"stop": [first[4:6]]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": True, "temperature": 1.5},
        {"max_new_tokens": 1},
    ):
        settings: dict[str, Any] = {"max_new_tokens": 12, **options}
        torch.manual_seed(0)
        expected = engine.generate(QUESTION, TEXTS, policy=FullRecompute(), **settings)
        torch.manual_seed(0)
        found = engine.generate(QUESTION, TEXTS, policy=behind, **settings)
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text), options
        assert found.finish_reason == expected.finish_reason


def test_batches_of_beams_and_stop_strings_equal_their_singles(engine: Engine) -> None:
    policy = CacheBlend(0.3)
    questions = [(QUESTION, TEXTS), (LONG_QUESTION, TEXTS[1:]), ("x", TEXTS[:1])]
    text = engine.generate(*questions[0], policy=policy, max_new_tokens=9).text
    stop = {"stop": [text[3:5]]}
    for options in ({"num_beams": 2}, stop, {"num_beams": 2, **stop}):
        settings: dict[str, Any] = {"max_new_tokens": 9, "policy": policy, **options}
        singles = [engine.generate(q, c, **settings) for q, c in questions]
        batch = engine.generate_batch(questions, **settings)
        assert [one.text for one in batch] == [one.text for one in singles]
        assert [one.token_ids for one in batch] == [one.token_ids for one in singles]
        assert [one.finish_reason for one in batch] == [one.finish_reason for one in singles]


def test_a_query_of_a_single_token(engine: Engine, behind: Picked) -> None:
    answerer = access.runner(engine)
    question = Question(QUESTION, TEXTS, {"policy": behind, "max_new_tokens": 6})
    made = engine._bound.plan([question])[0].request
    full = replace(made, policy=FullRecompute())
    prompts = [Prompt(one.rounds[0], one.query[-1:], one) for one in (made, full)]
    with torch.inference_mode():
        found, expected = (
            answer for prompt in prompts for answer in answerer.answers([prompt], 0.0, None, None)
        )
    assert found.token_ids == expected.token_ids
    alone, whole = (answerer.logits([prompt], len(prompt.query)) for prompt in prompts)
    assert error(alone, whole) < 1e-3


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_in_bfloat16_it_is_as_close_to_a_full_prefill_as_rounding_lets_it(name: str) -> None:
    model = build(name, dtype=torch.bfloat16)
    engine = Engine(model, byte_tokenizer(), template=TEMPLATE, store=MemoryStore())
    plain = plain_logits(engine, TEXTS)
    found = engine.logits(QUESTION, TEXTS, policy=Picked(all_that_may_be))
    exact = make_engine(name)
    exact.model.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    rounding = error(plain, plain_logits(exact, TEXTS))
    assert error(found, plain) < 3 * rounding + 1e-3


def test_chunks_from_a_coarse_store_are_computed_again_too(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, codec=Int8())
    engine = Engine(build("llama"), byte_tokenizer(), template=TEMPLATE, store=store)
    found = engine.logits(QUESTION, TEXTS, policy=Picked(all_that_may_be))
    plain = plain_logits(engine, TEXTS)
    assert error(found, plain) < 0.1 * error(engine.logits(QUESTION, TEXTS), plain)


# ---------------------------------------------------------------------- what runs, what it costs
@pytest.fixture
def passes(engine: Engine) -> Iterator[dict[str, list[int]]]:
    """Tokens that each part of the model was run on, pass by pass, once chunks are stored."""
    decoder = engine.model.model
    parts = {
        "embedding": decoder.embed_tokens,
        "second mlp": decoder.layers[1].mlp,
        "last mlp": decoder.layers[-1].mlp,
        "head": engine.model.lm_head,
    }
    seen: dict[str, list[int]] = {name: [] for name in parts}

    def noting(name: str) -> Callable[..., None]:
        return lambda _module, _given, output: seen[name].append(int(output.shape[-2]))

    hooks = [part.register_forward_hook(noting(name)) for name, part in parts.items()]
    engine.add(TEXTS)  # of a model with these hooks
    for passed in seen.values():
        passed.clear()
    yield seen
    for one in hooks:
        one.remove()


def test_one_pass_over_the_chosen_and_the_query_ends_at_the_last_keys(
    engine: Engine, passes: dict[str, list[int]]
) -> None:
    metrics = engine.generate(QUESTION, TEXTS, policy=LegoLink(16), max_new_tokens=1).metrics
    assert metrics.recomputed_tokens == 32  # of two chunks behind the first
    assert metrics.query_tokens > 1
    # One pass writes keys and values in place, the next reads the query's last token.
    assert passes["embedding"] == [32 + metrics.query_tokens - 1, 1]
    assert passes["last mlp"] == passes["head"] == [1]
    assert metrics.recompute > 0
    assert metrics.policy == "LegoLink(tokens=16, positions='reordered')"
    assert metrics.reused_tokens == sum(len(chunk) for chunk in engine.tokenize("?", TEXTS).chunks)
    parts = (metrics.load, metrics.stitch, metrics.choose, metrics.recompute, metrics.prefill)
    assert min(parts) > 0
    assert metrics.ttft >= sum(parts)


def test_the_signal_ends_before_the_attention_of_its_layer(
    engine: Engine, passes: dict[str, list[int]]
) -> None:
    asked = looking(lambda signals: [signals.deviation(1) for _ in range(3)])
    engine.generate(QUESTION, TEXTS, policy=asked, max_new_tokens=1)
    ids = engine.tokenize(QUESTION, TEXTS)
    # The signal, once for three questions, and the query over the stitched chunks.
    assert passes["embedding"] == [len(ids.context), len(ids.query)]
    assert passes["second mlp"] == [len(ids.query)]


def test_reuse_asks_for_nothing_and_counts_nothing(engine: Engine) -> None:
    for policy in (LegoLink(0), CacheBlend(0)):
        metrics = engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
        assert (metrics.choose, metrics.recompute, metrics.recomputed_tokens) == (0.0, 0.0, 0)
    one = engine.generate(QUESTION, TEXTS[:1], policy=CacheBlend(0.5), max_new_tokens=1).metrics
    assert one.recomputed_tokens == 0  # prefix and first chunk are what they are in a full prefill


def test_the_ratio_counts_all_chunk_tokens(engine: Engine) -> None:
    sizes = [len(chunk) for chunk in engine.tokenize(QUESTION, TEXTS).chunks]
    for ratio in (0.1, 0.25):
        policy = CacheBlend(ratio)
        metrics = engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
        assert metrics.recomputed_tokens == round(ratio * sum(sizes))


# ---------------------------------------------------------------------- models that cannot
def test_a_model_without_positions_cannot_compute_single_tokens_again() -> None:
    engine = make_engine("bloom")
    engine.generate(QUESTION, TEXTS[:1], max_new_tokens=1)
    # As if its places, too, could not be seen to be what its attention counts.
    adapter = access.adapter(engine)
    adapter.layout = replace(adapter.measured, by_place=False)

    last = Picked(lambda prompt, _: torch.arange(n := prompt.context_tokens) == n - 1)
    for call in (engine.generate, engine.logits):
        with pytest.raises(UnsupportedModelError, match="cannot be told where a token stands"):
            call(QUESTION, TEXTS[:1], policy=last)


def test_attention_that_takes_no_mask_cannot_compute_single_tokens_again() -> None:
    engine = make_engine("llama")
    engine.add(TEXTS)
    engine.model.config._attn_implementation_internal = "flash_attention_2"
    for call in (engine.generate, engine.logits):
        with pytest.raises(
            UnsupportedModelError, match='load the model with attn_implementation="sdpa"'
        ):
            call(QUESTION, TEXTS, policy=LegoLink())


def test_learned_positions_are_no_obstacle_in_the_natural_place() -> None:
    engine = make_engine("gpt2")

    odd = Picked(lambda prompt, _: torch.arange(prompt.context_tokens) % 2 == 1)
    found = engine.logits(QUESTION, TEXTS[:1], policy=odd)
    assert error(found, plain_logits(engine, TEXTS[:1])) < 1e-3


# ---------------------------------------------------------------------- scorers
class Words:
    """Scores the letter z; notes what it was given, and waits until it may go on."""

    def __init__(self) -> None:
        self.given: list[tuple[str, tuple[str, ...]]] = []
        self.thread: threading.Thread | None = None
        self.go = threading.Event()

    def scores(self, question: str, chunks: Sequence[str]) -> list[Tensor]:
        self.thread = threading.current_thread()
        self.given.append((question, tuple(chunks)))
        if not self.go.wait(20):
            raise TimeoutError("nothing was loaded meanwhile")
        return [torch.tensor([float(one == "z") for one in chunk]) for chunk in chunks]


@pytest.mark.parametrize("own", [True, False])
def test_a_scorer_works_beside_the_loading(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Words()
    engine = make_engine("qwen2", auxiliary=None if own else scorer)
    keys = engine.add(TEXTS)
    load = access.runner(engine).context_builder.loader.load

    def loading(_: Any, *arguments: Any, **options: Any) -> Any:
        found = load(*arguments, **options)
        scorer.go.set()
        return found

    monkeypatch.setattr(type(access.runner(engine).loader), "load", loading)
    found: list[Tensor] = []
    policy = looking(
        lambda signals: found.append(signals.relevance()),
        reads=("relevance",),
        auxiliary=scorer if own else None,
    )
    # By text, by key alone, and by text again.
    engine.generate(QUESTION, [TEXTS[0], keys[1], TEXTS[2]], policy=policy, max_new_tokens=1)
    assert scorer.given == [(QUESTION, tuple(TEXTS))]
    assert scorer.thread is not threading.current_thread()
    ids = engine.tokenize(QUESTION, TEXTS)
    z = engine.tokenizer("z")["input_ids"][-1]
    highest = [place for place, one in enumerate(ids.context) if one == z]
    assert found[0].shape == (len(ids.context),)
    assert set(highest) <= set((found[0] == 1).nonzero()[:, 0].tolist())
    assert found[0][: len(ids.prefix)].max() == found[0].min() == 0


@pytest.mark.parametrize(
    ("found", "kind", "message"),
    [
        (RuntimeError("no weights"), RuntimeError, "no weights"),
        ([torch.zeros(1)] * 3, InvalidInputError, "characters"),
        ([], InvalidInputError, "0 scores for 3 chunks"),
    ],
)
def test_what_goes_wrong_in_a_scorer_is_raised(found: Any, kind: Any, message: str) -> None:
    scorer = Mock()
    scorer.scores.side_effect = [found]
    policy = looking(lambda asked: asked.relevance(), reads=("relevance",), auxiliary=scorer)
    with pytest.raises(kind, match=message):
        make_engine("qwen2").generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1)
