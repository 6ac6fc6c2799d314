"""What is computed as it is: llama.cpp's own prefill, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from laws import QUESTION, TEXTS, Recorder, error
from llamacpp.asking import ids_of, opened, rounding
from llamacpp.ggufs import FAMILIES, LENGTH

from kvcache_rag import Engine, FullRecompute, Reuse

if TYPE_CHECKING:
    from llamacpp.conftest import Decoder, Files


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(family: str, files: Files) -> Engine:
    return opened(files(family))


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_full_recompute_is_llama_cpps_own_prefill(
    family: str, files: Files, own: Decoder, dtype: str, flash: bool
) -> None:
    """Law: `FullRecompute` = one `llama_decode` of the same ids, bit for bit."""
    engine = opened(files(family), dtype=dtype, model_kwargs={"flash_attn": flash})
    engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=3)  # leaves cells behind
    ids = ids_of(engine)
    expected = own(files(family), dtype=dtype, flash=flash).full(ids.all, len(ids.query))
    assert torch.equal(engine.logits(QUESTION, TEXTS, policy=FullRecompute()), expected)


def test_a_long_prefill_is_llama_cpps_own(family: str, files: Files, own: Decoder) -> None:
    """Law: also of more tokens than are computed at once."""
    engine, texts = opened(files(family), context_window=LENGTH), ["".join(TEXTS) * 8, *TEXTS]
    ids = ids_of(engine, texts)
    expected = own(files(family), cells=LENGTH).full(ids.all, len(ids.query))
    found = engine.logits(QUESTION, texts, policy=FullRecompute())
    assert torch.equal(found, expected)


def test_complete_is_llama_cpps_own_prefill(
    engine: Engine, family: str, files: Files, own: Decoder
) -> None:
    """Law: the logits of the first token of `complete` are its own, bit for bit."""
    text = "Once upon a time, there was a"
    seen = Recorder()
    engine.complete(text, max_new_tokens=1, logits_processor=[seen])
    expected = own(files(family)).full(engine.tokenize_text(text), 1)
    assert torch.equal(seen.steps[0], expected)


def test_prefix_and_first_chunk_are_a_full_prefill(
    engine: Engine, family: str, files: Files, own: Decoder
) -> None:
    """Law: the first chunk saw what it sees in the prompt; bit for bit."""
    ids = ids_of(engine, TEXTS[:1])
    expected = own(files(family)).full(ids.all, len(ids.query))
    found = engine.logits(QUESTION, TEXTS[:1], policy=Reuse())
    assert torch.equal(found, expected)


def test_the_laws_would_notice_another_position(
    engine: Engine, family: str, files: Files, own: Decoder
) -> None:
    """One position further the logits are the same but for rounding: equal bits say more.

    Where attention counts places (mpt), a position further is no other place.
    """
    ids = ids_of(engine)
    further = own(files(family)).full(ids.all, len(ids.query), first=1)
    found = engine.logits(QUESTION, TEXTS, policy=FullRecompute())
    assert torch.equal(found, further) is (family == "mpt")
    assert error(found, further) < 10 * rounding(family)
