"""What is measured about models, and what is refused with the layer and the reason."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import TEMPLATE
from zoo import BY_PLACE, FAMILIES, REFUSED, build, byte_tokenizer

from kvcache_rag import Combination, Engine, FullRecompute, Reuse
from kvcache_rag.errors import ContextTooLongError, UnsupportedModelError
from kvcache_rag.integration import open_engine
from kvcache_rag.kv.rotary import NO_ROTATION, Rotation, rotate
from kvcache_rag.models import hf
from kvcache_rag.models.attention.packed import packed_attention
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.models.probe import PROBE_TOKENS, ProbeSubject, measure_layout
from kvcache_rag.models.rotation import FrequencySet, LayerKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from kvcache_rag.models.probe import LayerCache

CAPTURABLE = ("gpt2", "opt", "hunyuan")
STATEFUL = [name for name in REFUSED if name not in CAPTURABLE]


def make_engine(name: str) -> Engine:
    return Engine(build(name), byte_tokenizer(), template=TEMPLATE)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_is_measured_alike_in_every_dtype(name: str) -> None:
    layout = TransformersModel(build(name, dtype=torch.bfloat16)).layout
    reference = TransformersModel(build(name)).layout
    assert layout is not None
    assert reference is not None
    assert layout.immovable == reference.immovable == ""
    assert layout.by_place == reference.by_place == (name in BY_PLACE)
    assert [(g.layout, g.key_rotation, g.value_rotation, g.window) for g in layout.groups] == [
        (g.layout, g.key_rotation, g.value_rotation, g.window) for g in reference.groups
    ]
    assert reference.residual < 1e-4


def test_layers_without_positions_are_found() -> None:
    layout = TransformersModel(build("smollm3")).layout
    assert layout is not None
    still = [g.layout.layers for g in layout.groups if g.key_rotation == NO_ROTATION]
    assert still == [(3,)]


def test_mla_keeps_its_rotary_part_in_the_value_slot() -> None:
    layout = TransformersModel(build("deepseek_v3")).layout
    assert layout is not None
    (group,) = layout.groups
    rotated, plain = group.value_rotation, group.key_rotation
    if plain != NO_ROTATION:  # before 5.16, transformers cached whole keys instead
        rotated, plain = plain, rotated
    assert plain == NO_ROTATION
    assert rotated.style == "half"
    assert not group.layout.is_fused


@pytest.mark.parametrize(
    "rotation",
    [Rotation("half", 8, 8, 0), Rotation("interleaved", 8, 8, 0, reverse=True)],
    ids=str,
)
def test_rotary_columns_may_stand_last(rotation: Rotation) -> None:
    """As in whole keys of MLA, which transformers cached before 5.16; no family does now."""
    frequency = FrequencySet("of the test", lambda _: 100.0 ** -(torch.arange(4) / 4))
    keys, values = torch.randn(2, 1, 2, PROBE_TOKENS, 16).unbind()
    nowhere = torch.zeros(PROBE_TOKENS, dtype=torch.long)

    def capture(ids: Tensor, start: int) -> Sequence[LayerCache]:
        places = torch.arange(start, start + ids.shape[1])
        return [(rotate(keys, rotation, frequency.at_rest, nowhere, places), values)]

    subject = ProbeSubject(
        name="of the test",
        capture=capture,
        behind=capture,
        kinds=(LayerKind(),),
        frequencies=(frequency,),
        dtype=torch.float32,
        vocabulary=300,
        limit=2048,
        takes_positions=True,
    )
    layout = measure_layout(subject)
    (group,) = layout.groups
    assert (group.key_rotation, group.value_rotation) == (rotation, NO_ROTATION)
    assert layout.immovable == ""


def test_layers_that_share_a_cache_store_nothing() -> None:
    layout = TransformersModel(build("gemma3n")).layout
    assert layout is not None
    stored = {layer for group in layout.groups for layer in group.layout.layers}
    assert stored == {0, 1, 2, 3}


@pytest.mark.parametrize("name", STATEFUL)
def test_recurrent_models_are_refused_with_layer_and_reason(name: str) -> None:
    engine = make_engine(name)
    for call in (
        lambda: engine.add(["some text"]),
        lambda: engine.add_combination([["some text", "more"]]),
        lambda: engine.generate("Who?", ["some text"], policy=Reuse()),
        lambda: engine.generate("Who?", ["some text"], policy=Combination()),
    ):
        with pytest.raises(UnsupportedModelError, match=r"layer \d+ (keeps|wrote) .*") as caught:
            call()
        assert REFUSED[name][2] in str(caught.value)
    answer = engine.generate("Who?", ["some text"], policy=FullRecompute(), max_new_tokens=3)
    assert answer.metrics.generated_tokens >= 1


@pytest.mark.parametrize("name", CAPTURABLE)
def test_keys_that_cannot_move_are_refused_only_when_they_would_have_to(name: str) -> None:
    engine = make_engine(name)
    texts = ["first text", "second text"]
    with pytest.raises(UnsupportedModelError, match=r"layer \d+") as caught:
        engine.generate("Who?", texts, policy=Reuse())
    assert "use Combination()" in str(caught.value)
    assert REFUSED[name][2] in str(caught.value)
    full = engine.generate("Who?", texts, policy=FullRecompute(), max_new_tokens=4)
    assert full.metrics.reused_tokens == 0
    # One chunk stands where it was computed, so nothing moves.
    one = engine.logits("Who?", texts[:1], policy=Reuse())
    plain = engine.logits("Who?", texts[:1], policy=FullRecompute())
    assert float((one - plain).abs().max() / plain.std()) < 1e-3
    assert engine.generate("Who?", texts[:1], max_new_tokens=4).metrics.reused_tokens > 0


@pytest.mark.parametrize("name", ["llama dynamic", "llama longrope", "llama4", "ministral3"])
def test_prompts_beyond_the_regime_of_the_frequencies_are_refused(name: str) -> None:
    engine = make_engine(name)
    layout = access.adapter(engine).layout
    assert layout is not None
    assert layout.limit is not None
    assert engine.context_window == layout.limit
    letters = random.Random(1)
    texts = ["".join(letters.choices("abcdefgh", k=layout.limit // 4)) for _ in range(5)]
    with pytest.raises(ContextTooLongError, match=r"room for .*; beyond \d+ tokens") as caught:
        engine.generate("Who?", texts, max_new_tokens=4)
    may_be_longer = access.adapter(engine).longest(None) > layout.limit
    assert may_be_longer == ("FullRecompute()" in str(caught.value))
    if not may_be_longer:  # dynamic NTK's config names the trained length
        return
    # A full prefill is the model's own affair.
    found = engine.logits("Who?", texts, policy=FullRecompute())
    ids = engine.tokenize("Who?", texts)
    assert len(ids.all) > layout.limit
    with torch.no_grad():
        plain = engine.model(torch.tensor([ids.all])).logits[0, -len(ids.query) :]
    assert float((found - plain).abs().max() / plain.std()) < 1e-3


def test_packed_attention_gives_the_same_answers_as_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    model, called = build("qwen2"), Counter[str]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        called["packed"] += 1
        return packed_attention(*args, **kwargs)

    monkeypatch.setattr(hf, "packed", counted)
    stock = Engine(model, byte_tokenizer(), template=TEMPLATE, packed_attention=False)
    texts = ["The cat sat on the mat.", "A dog ran away from home."]
    expected = stock.logits("Who?", texts)
    assert not called
    packed = Engine(model, byte_tokenizer(), template=TEMPLATE)
    assert float((packed.logits("Who?", texts) - expected).abs().max()) < 1e-4
    assert called.pop("packed")
    model(torch.tensor([[5, 6, 7]]))
    assert not called, "the app's own passes are stock"


def test_two_models_never_share_keys() -> None:
    one = Engine(build("qwen2", seed=0), byte_tokenizer(), template=TEMPLATE)
    same = Engine(build("qwen2", seed=0), byte_tokenizer(), template=TEMPLATE)
    other = Engine(build("qwen2", seed=1), byte_tokenizer(), template=TEMPLATE)
    assert one.keys(["text"]) == same.keys(["text"])
    assert one.spec == same.spec != other.spec


def test_rounded_frequencies_change_the_spec() -> None:
    careful = Engine(build("qwen2", dtype=torch.bfloat16), byte_tokenizer(), template=TEMPLATE)
    rounded = Engine(build("qwen2").to(torch.bfloat16), byte_tokenizer(), template=TEMPLATE)
    assert careful.spec != rounded.spec


@pytest.mark.parametrize("place", ["meta", {"": "meta"}, {"": "disk"}])
def test_a_model_without_numbers_is_refused(place: Any, tmp_path: Path) -> None:
    wanted = r"^the model is on meta, where no numbers are \(offloaded, or never loaded\); load it"
    spread = build("qwen2")
    spread.model.layers[3].to("meta")
    with pytest.raises(UnsupportedModelError, match="spread over cpu, meta, where no numbers are"):
        Engine(spread, byte_tokenizer(), template=TEMPLATE)
    with pytest.raises(UnsupportedModelError, match=wanted):
        Engine(build("qwen2").to("meta"), byte_tokenizer(), template=TEMPLATE)
    with pytest.raises(UnsupportedModelError, match=wanted):
        open_engine("tiny", device_map=place, model_kwargs={"offload_folder": str(tmp_path)})
