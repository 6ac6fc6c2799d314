"""What policies compute again is what llama.cpp, and transformers, compute of the same tokens.

llama.cpp computes tokens again run by run, in order of their places; transformers in one pass in
which every token sees what stands before its place.  Both are the project's law (`docs/design.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from laws import LONG_QUESTION, QUESTION, TEXTS, error
from llamacpp.asking import (
    FixedScorer,
    Picked,
    heads,
    ids_of,
    opened,
    parts,
    random_third,
    rounding,
)
from llamacpp.ggufs import FAMILIES, LENGTH, WINDOW
from torch import Tensor

from kvcache_rag import (
    BestFew,
    BestLast,
    CacheClip,
    Combination,
    Engine,
    FullRecompute,
    LegoLink,
    Reuse,
)
from kvcache_rag_llamacpp import contexts as cells

if TYPE_CHECKING:
    from pathlib import Path

    from llamacpp.conftest import Decoder, Files

    from kvcache_rag.policies import ReusePolicy


CHOOSING: dict[str, ReusePolicy] = {
    "heads of one token": LegoLink(1),
    "heads": LegoLink(7),
    "heads longer than some chunks": LegoLink(50),
    "the same by a function": Picked(heads(7)),
    "a random third": Picked(random_third),
    "by scores": CacheClip(FixedScorer(), ratio=0.4),
    "by scores, single tokens": CacheClip(FixedScorer(), ratio=0.4, window=1, threshold=0),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(family: str, files: Files) -> Engine:
    return opened(files(family))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What policies chose, `(context_tokens,)` bool each."""
    found: list[Tensor] = []
    real = cells.chosen_tokens

    def noted(*given: Any) -> Tensor:
        found.append(real(*given))
        return found[-1]

    monkeypatch.setattr(cells, "chosen_tokens", noted)
    return found


# ---------------------------------------------------------------------- of llama.cpp itself
@pytest.mark.parametrize("name", CHOOSING)
def test_chosen_tokens_are_computed_where_they_stand(
    engine: Engine, family: str, files: Files, own: Decoder, chosen: list[Tensor], name: str
) -> None:
    """Law: chunks of which chosen tokens are decoded again, in order, behind all before them.

    Chunks are longer than the windows, so tokens in their middle look at keys that a state of the
    whole chunk would not have.
    """
    found = engine.logits(QUESTION, TEXTS, policy=CHOOSING[name])
    again = set(chosen[-1].nonzero()[:, 0].tolist())
    assert again
    assert len(TEXTS[0]) > WINDOW
    ids = parts(ids_of(engine))
    expected = own(files(family)).stitched(*ids, again=again)
    assert error(found, expected) < rounding(family)
    if family in ("gemma3", "mpt"):  # a table hides what few tokens change that few tokens see
        return
    # The law can fail: nothing computed again, and one token less.
    assert error(found, own(files(family)).stitched(*ids)) > 10 * rounding(family)
    less = own(files(family)).stitched(*ids, again=again - {max(again)})
    assert error(found, less) > rounding(family)


def test_all_tokens_computed_again_are_a_full_prefill(
    engine: Engine, family: str, files: Files, own: Decoder
) -> None:
    ids = ids_of(engine)
    expected = own(files(family)).full(ids.all, len(ids.query))
    for policy in (LegoLink(1000), Picked(lambda prompt: torch.ones(prompt.context_tokens) > 0)):
        found = engine.logits(QUESTION, TEXTS, policy=policy)
        assert error(found, expected) < rounding(family)
    reused = engine.logits(QUESTION, TEXTS, policy=Reuse())
    assert error(reused, expected) > 20 * rounding(family)


def test_a_long_chunk_in_parts(
    family: str, files: Files, own: Decoder, chosen: list[Tensor]
) -> None:
    """Law: the same of a chunk of several batches, from whose middle tokens are chosen."""
    texts = [TEXTS[0], "".join(TEXTS) * 7, TEXTS[1]]
    engine = opened(files(family), context_window=LENGTH)
    found = engine.logits(QUESTION, texts, policy=CacheClip(FixedScorer(), ratio=0.3))
    again = set(chosen[-1].nonzero()[:, 0].tolist())
    expected = own(files(family), cells=LENGTH).stitched(*parts(ids_of(engine, texts)), again=again)
    assert error(found, expected) < rounding(family)


# ---------------------------------------------------------------------- of transformers
def _pairs(files: Files, float_smollm2: Path, name: str) -> tuple[Engine, Engine]:
    if name != "smollm2":
        path = files(name)
        return opened(path), opened(path, backend="transformers")
    shared: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
    return (
        Engine.from_pretrained(float_smollm2, backend="llama.cpp", **shared),
        Engine.from_pretrained(float_smollm2, **shared),
    )


@pytest.fixture(scope="module", params=["llama", "qwen2", "smollm2"])
def both(
    request: pytest.FixtureRequest, files: Files, float_smollm2: Path
) -> tuple[Engine, Engine]:
    """The same float32 weights in llama.cpp and in transformers.

    transformers reads no scaling of RoPE from a GGUF file, and no scale of attention, so that other
    families are not the same there.
    """
    return _pairs(files, float_smollm2, request.param)


@pytest.mark.parametrize(
    "policy",
    [FullRecompute(), Reuse(), BestLast(), BestFew(2), Combination(), *CHOOSING.values()],
    ids=["full", "reuse", "bestlast", "bestfew", "combination", *CHOOSING],
)
def test_policies_are_those_of_transformers(
    both: tuple[Engine, Engine], policy: ReusePolicy
) -> None:
    """Law: equal weights, equal logits.  Measured: up to 2e-5."""
    ours, theirs = both
    assert ours.tokenize(LONG_QUESTION, TEXTS) == theirs.tokenize(LONG_QUESTION, TEXTS)
    found, expected = (one.logits(LONG_QUESTION, TEXTS, policy=policy) for one in both)
    assert error(found, expected) < 1e-4
