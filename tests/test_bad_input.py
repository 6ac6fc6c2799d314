"""Whatever a caller or a store does wrong: one clear sentence, or the right answer all the same."""

from __future__ import annotations

import copy
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from laws import QUESTION, TEMPLATE, Picked, looking
from tokenizers import normalizers
from transformers import GenerationConfig, StoppingCriteria
from zoo import build, byte_tokenizer

from kvcache_rag import (
    DiskStore,
    Engine,
    FullRecompute,
    InvalidInputError,
    MemoryStore,
    PromptTemplate,
    Reuse,
    TieredStore,
)
from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.integration import open_engine
from kvcache_rag_server.prefetch import twin

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from kvcache_rag.kv import ChunkKey, ChunkKV
    from kvcache_rag.policies import ReusePolicy

TEXTS = ["The cat sat on the mat.", "A dog ran away from home."]


def make_engine(store: Any = None, seed: int = 0, **options: Any) -> Engine:
    options = {"template": TEMPLATE, **options}
    return Engine(build("qwen2", seed=seed), byte_tokenizer(), store=store, **options)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def expected(engine: Engine) -> tuple[int, ...]:
    return engine.generate(QUESTION, TEXTS, max_new_tokens=5).token_ids


def test_an_empty_corpus_is_no_work(engine: Engine) -> None:
    assert make_engine().add([]) == []
    assert make_engine().add([], show_progress=True) == []
    assert engine.keys([]) == []
    engine.delete([])
    assert engine.generate_batch([]) == []


@pytest.mark.parametrize(
    ("question", "chunks", "message"),
    [
        *((nothing, TEXTS, "the question is empty") for nothing in ("", " \n", None, 5, ["Who?"])),
        (QUESTION, ["text", ""], "chunk 1 is empty; leave it out"),
        (QUESTION, ["text", "  \n\t"], "chunk 1 is empty; leave it out"),
        (QUESTION, ["text", None], "chunk 1 is a NoneType; give a text"),
        (QUESTION, ["text", 7], "chunk 1 is a int; give a text"),
        (QUESTION, ["text", b"bytes"], "chunk 1 is a bytes; give a text"),
        (QUESTION, ["text", ["nested"]], "chunk 1 is a list; give a text"),
        (QUESTION, ["text", {"text": "x"}], "chunk 1 is a dict; give a text"),
        (QUESTION, "text", "a list of texts or keys, not one text"),
        (QUESTION, 3, "chunks must be a list of texts or keys"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_said_however_it_is_asked(
    engine: Engine, question: Any, chunks: Any, message: str
) -> None:
    for ask in (
        lambda: engine.generate(question, chunks),
        lambda: engine.stream(question, chunks),
        lambda: engine.logits(question, chunks),
        lambda: engine.generate_batch([(QUESTION, TEXTS), (question, chunks)]),
    ):
        with pytest.raises(InvalidInputError, match=message):
            ask()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["text", ""], "chunk 1 is empty; leave it out"),
        ("text", "list of texts"),
        (3, "chunks must be a list of texts"),
        (["fine", "torn \ud800 pair"], "chunk 1 .*Unicode"),
    ],
)
def test_what_cannot_be_added_is_said(engine: Engine, texts: Any, message: str) -> None:
    for call in (engine.add, engine.keys):
        with pytest.raises(InvalidInputError, match=message):
            call(texts)


@pytest.mark.parametrize("prompt", ["", None, 5])
def test_an_empty_completion_is_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(InvalidInputError, match="the prompt is empty"):
        engine.complete(prompt)


def test_a_completion_without_tokens_is_refused() -> None:
    """The packaged reader's tokenizer has none for space alone."""
    engine = Engine.from_pretrained("tiny", device="cpu")
    for prompt in (" ", "\n\t "):
        with pytest.raises(InvalidInputError, match="the prompt is empty"):
            engine.complete(prompt)


@pytest.mark.parametrize("policy", [Reuse(), FullRecompute()], ids=lambda one: one.name)
def test_no_chunks_is_a_question_like_any_other(engine: Engine, policy: ReusePolicy) -> None:
    answer = engine.generate(QUESTION, [], policy=policy, max_new_tokens=5)
    ids = torch.tensor([engine.tokenize(QUESTION).all])
    plain = engine.model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
    assert list(answer.token_ids) == plain.tolist()
    assert (answer.metrics.reused_tokens, answer.metrics.prefilled_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.tokenize(QUESTION, "text"), "a list of texts, not one text"),
        (lambda engine: engine.generate(QUESTION, TEXTS, history=3), "history must be a list of"),
        (lambda engine: engine.generate(QUESTION, TEXTS, history="text"), "history"),
        (lambda engine: engine.generate(QUESTION, TEXTS, history=[("user", "x")]), "history"),
        (
            lambda engine: engine.generate(QUESTION, TEXTS, history=[{"role": ["user"]}]),
            r"history\[0\] must have the role",
        ),
        (lambda engine: engine.generate(QUESTION, TEXTS, scores=3), "scores must be a list of num"),
        (lambda engine: engine.generate(QUESTION, TEXTS, scores=[0.5]), "1 scores for 2 chunks"),
        (lambda engine: engine.generate(QUESTION, TEXTS, tools=3), "tools must be a list of"),
        (lambda engine: engine.generate_batch([(QUESTION,)]), r"must be \(question, chunks\)"),
        (lambda engine: engine.generate_batch([QUESTION]), r"must be \(question, chunks\)"),
        (lambda engine: engine.delete(engine.add(TEXTS)[0]), "keys must be a list of ChunkKey"),
        (lambda engine: engine.delete(["abc"]), "keys must be a list of ChunkKey, not 'abc'"),
        (lambda engine: engine.load_ahead(["abc"]), "keys must be a list of ChunkKey, not 'abc'"),
        (lambda _: Engine(None, byte_tokenizer()), "must be a loaded model, not None"),
        (lambda _: Engine("qwen2", byte_tokenizer()), "Engine.from_pretrained takes a name"),
        (lambda _: Engine(build("qwen2"), None), "must be the model's tokenizer, not None"),
        (lambda _: make_engine(template="Read."), "must be a PromptTemplate, not 'Read.'"),
    ],
)
def test_an_argument_of_another_kind_is_told(
    engine: Engine, call: Callable[[Engine], Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call(engine)


def test_numbers_and_lists_of_other_libraries_are_taken(
    engine: Engine, expected: tuple[int, ...]
) -> None:
    texts: Any = numpy.array(TEXTS)
    once: Any = iter(TEXTS)
    history = numpy.array([])
    count, scores = numpy.int64(5), numpy.array([2.0, 1.0])
    options: Any = {"max_new_tokens": count, "history": history, "scores": scores}
    assert engine.generate(QUESTION, texts, **options).token_ids == expected
    assert engine.generate(QUESTION, TEXTS, temperature=numpy.float32(0.0), max_new_tokens=5)
    assert engine.add(once) == engine.add(TEXTS)


def test_a_chunk_that_the_tokenizer_has_nothing_for_is_named() -> None:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    bare = PromptTemplate(system="Read this.\n", chunk_start="", chunk_end="")
    engine = Engine(build("qwen2"), tokenizer, template=bare)
    with pytest.raises(InvalidInputError, match="chunk 1 has no tokens; leave it out"):
        engine.generate(QUESTION, [TEXTS[0], "\u200b"])


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens must be a positive number, not 0"),
    ({"max_new_tokens": -3}, "not -3"),
    ({"max_new_tokens": 1.5}, "not 1.5"),
    ({"max_new_tokens": "8"}, "not '8'"),
    ({"max_new_tokens": None}, "not None"),
    ({"max_new_tokens": True}, "not True"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"temperature": -1}, "temperature must be a number"),
    ({"temperature": float("nan")}, "temperature must be a number"),
    ({"temperature": "warm"}, "temperature must be a number"),
    ({"temperature": True}, "temperature must be a number"),
    ({"stop": 5}, "stop"),
    ({"stop": [None]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"overflow": "truncate"}, 'must be "error", "drop_lowest" or "refine", not \'truncate\''),
    ({"prompt_lookup_num_tokens": -3}, "prompt_lookup_num_tokens must be a whole number"),
    ({"assistant_model": object()}, "assistant_model gives wrong tokens"),
    ({"assistant_early_exit": 2}, "assistant_early_exit gives wrong tokens"),
    ({"past_key_values": None}, "past_key_values is set by the engine"),
    ({"max_length": 9}, "max_length is set by the engine"),
    ({"use_cache": False}, "use_cache is set by the engine"),
    ({"num_return_sequences": 2}, "call generate several times"),
    ({"penalty_alpha": 0.6}, "penalty_alpha asks for contrastive search, which is not done here"),
    ({"dola_layers": "low"}, "dola_layers asks for .* which is not done here; leave it out"),
    ({"constraints": [1]}, "constraints asks for constrained beam search, which is not done"),
    ({"force_words_ids": [[5]]}, "force_words_ids asks for constrained beam search"),
    ({"use_mtp": True}, "use_mtp asks for .* leave it out"),
    ({"token_healing": True}, "token_healing asks for .* leave it out"),
    ({"num_beams": 2, "num_beam_groups": 2}, "leave num_beam_groups out"),
    ({"num_beams": -2}, "num_beams must be positive, not -2"),
    ({"num_beams": "x"}, "num_beams must be a whole number, not 'x'"),
    ({"num_return_sequences": "x"}, "num_return_sequences must be a whole number, not 'x'"),
    ({"prefill_chunk_size": -1}, "prefill_chunk_size must be positive, not -1"),
    ({"top_p": "x"}, "top_p must be a number, not 'x'"),
    ({"max_time": "x"}, "max_time must be a number, not 'x'"),
    ({"repetition_penalty": True}, "repetition_penalty must be a number, not True"),
    ({"eos_token_id": "x"}, "eos_token_id must be the number of a token, or a list of them"),
    ({"stop_strings": 3}, "stop_strings must be a text, or a list of texts, not 3"),
    ({"stopping_criteria": [3]}, r"stopping_criteria must be a list of functions, not \[3\]"),
    ({"logits_processor": 3}, "logits_processor must be a list of functions, not 3"),
    ({"generation_config": {"top_k": 3}}, "must be a GenerationConfig, not a dict; give options"),
]

# What transformers says of them, on one line.
BAD_FOR_TRANSFORMERS: list[dict[str, Any]] = [
    {"repetition_penalty": -1.0},
    {"do_sample": True, "top_k": -1},
    {"bad_words_ids": 3},
    {"begin_suppress_tokens": 5},
    {"watermarking_config": 3},
    {"compile_config": 3},
    {"prefix_allowed_tokens_fn": 3},
    {"streamer": 3},
    {"forced_eos_token_id": 10**9},
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda one: str(one)[:30])
def test_options_that_cannot_be_used_say_why(
    engine: Engine, options: dict[str, Any], message: str
) -> None:
    for call in (engine.generate, engine.stream):
        with pytest.raises(InvalidInputError, match=message):
            call(QUESTION, TEXTS, **options)
    if "overflow" not in options:
        with pytest.raises(InvalidInputError, match=message):
            engine.complete("Once", **options)


@pytest.mark.parametrize("options", BAD_FOR_TRANSFORMERS, ids=lambda one: list(one)[-1])
def test_an_option_that_transformers_cannot_use_is_named(
    engine: Engine, options: dict[str, Any]
) -> None:
    wanted = f"^generate\\(\\) of transformers cannot use its options, .*{[*options][-1]}: .*"
    with pytest.raises(InvalidInputError, match=wanted) as found:
        engine.generate(QUESTION, TEXTS, max_new_tokens=3, **options)
    assert "\n" not in str(found.value)


def test_what_a_function_of_the_app_raises_is_its_own(engine: Engine) -> None:
    class Broken(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        engine.generate(QUESTION, TEXTS, stopping_criteria=[Broken()])


@pytest.mark.parametrize(
    "recommended",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"force_words_ids": [[5]]},
        {"assistant_early_exit": 2},
        {"use_mtp": True},
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_mode_that_a_model_recommends_and_nobody_asks_for_is_left_out(
    recommended: dict[str, Any], expected: tuple[int, ...]
) -> None:
    engine = make_engine()
    engine.model.generation_config = GenerationConfig(**recommended)
    said = engine.generate(QUESTION, TEXTS, max_new_tokens=5)
    assert said.token_ids == expected
    own = engine.model.generation_config
    with pytest.raises(InvalidInputError, match=f"^{next(iter(recommended))} "):
        engine.generate(QUESTION, TEXTS, max_new_tokens=5, generation_config=own)


def test_what_needs_an_end_says_so(engine: Engine) -> None:
    config = GenerationConfig(exponential_decay_length_penalty=(2, 1.1))
    with pytest.raises(InvalidInputError, match=r"^exponential_decay_length_penalty needs an eos"):
        engine.generate(QUESTION, TEXTS, max_new_tokens=5, generation_config=config)


def test_beams_cannot_stream(engine: Engine) -> None:
    with pytest.raises(InvalidInputError, match="beam search cannot stream"):
        engine.stream(QUESTION, TEXTS, num_beams=2)
    with pytest.raises(InvalidInputError, match="beam search cannot stream"):
        engine.stream_complete("Once", num_beams=2)


@dataclass(frozen=True)
class Both(Picked):
    adjacent_query: bool = True


def picked(pick: Callable[[int], Any], kind: type[Picked] = Picked, **options: Any) -> Picked:
    return kind(lambda prompt, _: pick(prompt.context_tokens), **options)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (picked(lambda n: torch.zeros(n + 1) > 0), r"selects from shape \(\d+,\); select must"),
        (picked(lambda n: torch.zeros(1, n) > 0), "one per context token"),
        (picked(torch.zeros), "by torch.float32; select must return a bool"),
        (picked(lambda n: [True] * n), "by list; select must return a bool tensor"),
        (picked(lambda n: None), "selects tokens by NoneType"),
        (picked(lambda n: torch.ones(n) > 0, Both), "choose one of the two"),
        (looking(lambda signals: signals.deviation(99)), "layer 99 keeps no values of its own"),
        (looking(lambda signals: signals.relevance()), r'set its reads = \("relevance",\)'),
        (picked(lambda n: None, reads=("relevance",)), "needs an auxiliary model"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_policy_that_asks_or_selects_nonsense_is_refused(
    engine: Engine, policy: ReusePolicy, message: str
) -> None:
    for call in (engine.generate, engine.logits):
        with pytest.raises(InvalidInputError, match=message):
            call(QUESTION, TEXTS, policy=policy)
    with pytest.raises(InvalidInputError, match=message):
        engine.generate_batch([(QUESTION, TEXTS)], policy=policy)


def test_criteria_and_processors_of_the_caller_are_kept(engine: Engine) -> None:
    class Third(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            done = input_ids.shape[1] >= len(engine.tokenize(QUESTION, TEXTS).all) + 3
            return torch.full((input_ids.shape[0],), done)

    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=9, stopping_criteria=[Third()])
    assert len(answer.token_ids) == 3
    assert answer.finish_reason == "stop"


# ---------------------------------------------------------------------- stores that fail
class Full(MemoryStore):
    """A disk without room."""

    def put(self, key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
        self._counters.failed("no space left")
        return False


class Damaged(MemoryStore):
    """Says it holds everything, and gives back nothing but the news that it was damaged."""

    def contains(self, key: ChunkKey) -> bool:
        return True

    def get(self, *_: Any, out: ChunkKV | None = None) -> Any:
        if out is not None:
            for group in out.tensors:
                for tensor in group:
                    tensor.fill_(float("nan"))  # "on an error their content is undefined"
            out.tokens.fill_(-1)
        raise CorruptChunkError("the bytes are not those of the chunk")


def test_a_store_that_cannot_write_costs_time_and_nothing_else(expected: tuple[int, ...]) -> None:
    store = Full()
    engine = make_engine(store)
    for _ in range(2):
        answer = engine.generate(QUESTION, TEXTS, max_new_tokens=5)
        assert answer.token_ids == expected
        assert (answer.metrics.misses, answer.metrics.hits) == (2, {})
    assert store.stats().put_failures >= 4
    assert engine.generate_batch([(QUESTION, TEXTS)] * 2, max_new_tokens=5)[1].token_ids == expected
    assert engine.add(TEXTS) == make_engine().keys(TEXTS)


def test_a_damaged_chunk_is_a_miss(expected: tuple[int, ...]) -> None:
    engine = make_engine(Damaged())
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=5)
    assert answer.token_ids == expected
    assert answer.metrics.misses == 2


FAULTS: dict[str, Callable[[Path, list[Path]], object]] = {
    "cut": lambda root, files: [os.truncate(path, 4100) for path in files],
    "emptied": lambda root, files: [path.write_bytes(b"") for path in files],
    "zeroed": lambda root, files: [path.write_bytes(bytes(path.stat().st_size)) for path in files],
    "a bit flipped": lambda root, files: [flip(path) for path in files],
    "rotated names": lambda root, files: rotate(files),
    "folders": lambda root, files: [(path.unlink(), path.mkdir()) for path in files],
    "links": lambda root, files: [(path.unlink(), path.symlink_to(root)) for path in files],
    "pipes": lambda root, files: [(path.unlink(), os.mkfifo(path)) for path in files],
    "gone": lambda root, files: shutil.rmtree(root),
    "root is a file": lambda root, files: (shutil.rmtree(root), root.write_bytes(b"")),
}


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def rotate(files: list[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("tiers", [1, 2])
def test_whatever_happens_to_its_files_a_question_never_fails(
    tmp_path: Path, fault: str, tiers: int
) -> None:
    texts = [f"Chunk number {number} says {number * 3}." for number in range(3)]  # of one length
    expected = make_engine().generate(QUESTION, texts, max_new_tokens=5).token_ids
    root = tmp_path / "kv"
    make_engine(DiskStore(root, durable=False)).add(texts)
    files = sorted(root.rglob("*.safetensors"))
    assert len(files) >= len(texts)
    disk = DiskStore(root, durable=False)
    engine = make_engine(disk if tiers == 1 else TieredStore(MemoryStore(), disk))
    FAULTS[fault](root, files)
    first = engine.generate(QUESTION, texts, max_new_tokens=5)
    assert first.token_ids == expected
    assert first.metrics.misses > 0
    again = engine.generate(QUESTION, texts, max_new_tokens=5)
    assert again.token_ids == expected
    if fault != "root is a file" or tiers == 2:
        assert again.metrics.misses == 0, "what was missing is stored anew"
    stats = disk.stats()
    assert stats.misses + stats.corrupt > 0


def no_gpus(monkeypatch: pytest.MonkeyPatch, *, built: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8" if built else None)


@pytest.mark.parametrize("place", ["cuda", "cuda:1", torch.device("cuda"), 0])
def test_cuda_that_is_not_there_is_said_in_one_sentence(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpus(monkeypatch, built=False)
    wanted = (
        r"^there is no cuda(:[01])? here, as this torch was built without CUDA; say cpu, or leave "
        "the device out$"
    )
    for way in (
        lambda: Engine.from_pretrained("tiny", device=place),
        lambda: Engine.from_pretrained("tiny", model_kwargs={"device_map": place}),
        lambda: Engine.from_pretrained("tiny", model_kwargs={"device_map": {"": place}}),
        lambda: open_engine("tiny", device_map=place),
        lambda: twin(make_engine(), place),
    ):
        with pytest.raises(InvalidInputError, match=wanted):
            way()
    no_gpus(monkeypatch, built=True)
    with pytest.raises(InvalidInputError, match=r"as torch finds no GPU; say cpu"):
        Engine.from_pretrained("tiny", device=place)


def test_a_device_that_is_not_there_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for place in ("gpu", "cuda:x", 1.5, ["cpu"]):
        with pytest.raises(InvalidInputError, match=r"is no device; say cpu, cuda or cuda:1$"):
            Engine.from_pretrained("tiny", device=place)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidInputError, match=r"^torch finds no xpu here; say cpu, or leave"):
        Engine.from_pretrained("tiny", device="xpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidInputError, match=r"^there is no cuda:7 here, only cuda:0, cuda:1; "):
        Engine.from_pretrained("tiny", device="cuda:7")


def test_a_plan_of_transformers_is_no_device() -> None:
    for plan in ("auto", "balanced", "sequential"):
        assert open_engine("tiny", device_map=plan).model.device == torch.device("cpu")


def damaged(folder: Path) -> None:
    build("qwen2").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"garbage garbage garbage")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("tiny", {"model_kwargs": {"dtypo": 1}}, r"cannot load the model 'tiny': .*'dtypo'$"),
        ("tiny", {"dtype": "flaot32"}, "flaot32"),
        ("tinny", {}, r"; did you mean 'tiny'\?$"),
        (lambda folder: None, {}, "cannot load the model"),
        (damaged, {}, "cannot load the model"),
    ],
    ids=["option", "dtype", "name", "empty folder", "damaged weights"],
)
def test_a_model_that_cannot_be_loaded_is_said_in_one_sentence(
    tmp_path: Path, name: Any, options: dict[str, Any], said: str
) -> None:
    if callable(name):
        name(tmp_path)
        name = str(tmp_path)
    with pytest.raises(InvalidInputError, match=said) as found:
        Engine.from_pretrained(name, **options)
    assert "\n" not in str(found.value)


def test_what_is_no_store_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = r"^store must be a store, not 'kv'; give DiskStore\('kv'\)$"
    with pytest.raises(InvalidInputError, match=wanted):
        make_engine("kv")
    with pytest.raises(InvalidInputError, match=r"^combinations must be a store, not 3"):
        make_engine(combinations=3)
    with pytest.raises(InvalidInputError, match=r"^a tier must be a store"):
        TieredStore("kv", MemoryStore())
    monkeypatch.setattr("kvcache_rag.engine.load", None)
    with pytest.raises(InvalidInputError, match=wanted):
        Engine.from_pretrained("tiny", store="kv")


@pytest.mark.parametrize("policy", [Reuse(), FullRecompute()], ids=repr)
def test_a_token_without_an_embedding_is_told(policy: Any) -> None:
    """An app gave its tokenizer tokens, and its model none for them."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_tokens([f"<new{number}>" for number in range(80)])
    template = PromptTemplate(system="<new79>\n")
    engine = Engine(build("qwen2"), tokenizer, policy=policy, template=template)
    said = r"^token 338 is beyond the model's 300 embeddings; .*resize_token_embeddings"
    for ask in (engine.generate, engine.logits):
        with pytest.raises(InvalidInputError, match=said):
            ask("Who?", ["A cat."])
    with pytest.raises(InvalidInputError, match=said):
        engine.add(["A cat."])
    with pytest.raises(InvalidInputError, match=said):
        engine.complete("<new79>")
    engine.model.resize_token_embeddings(len(tokenizer))
    engine = Engine(engine.model, tokenizer, policy=policy, template=template)
    assert engine.generate("Who?", ["A cat."], max_new_tokens=2).token_ids
    assert engine.complete("<new79>", max_new_tokens=2).token_ids
