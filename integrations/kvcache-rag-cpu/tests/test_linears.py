"""Linear layers in other forms: the same numbers, or rounded ones that are a model of their own."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from laws import QUESTION, TEMPLATE, TEXTS, TOLERANCE, error, masked_logits, plain_logits
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, FullRecompute, InvalidInputError, MemoryStore, Reuse
from kvcache_rag.integration import open_engine, parameter_count
from kvcache_rag.models import pack_weights, unpack_weights
from kvcache_rag.models.adapters import write_training
from kvcache_rag.models.question_adapter import acting, put_question_adapter, question_adapter
from kvcache_rag.models.weights import Weights, model_identity
from kvcache_rag_cpu import linears
from kvcache_rag_cpu.linears import Int4Linear, Int8Linear, PackedLinear, PrepackedLinear
from kvcache_rag_server.prefetch import twin

if TYPE_CHECKING:
    from pathlib import Path

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Half of the last place of a number, as a part of it.
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}

FORMS = {"prepacked": PrepackedLinear, "int8": Int8Linear, "int4": Int4Linear}
ROUNDED = ["int8", "int4"]

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU does not multiply bfloat16 (AVX-512)",
)
ALL = [pytest.param("prepacked", marks=needs_bfloat16), *ROUNDED]

# peft asks transformers by a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def make(dtype: torch.dtype = BF16, *, tied: bool = False, bias: bool = False) -> Any:
    """A small model of which all layers can be packed."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    # As from_pretrained does, which keeps rotary frequencies in float32.
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_engine(model: Any, **options: Any) -> Engine:
    options = {"template": TEMPLATE, "store": MemoryStore(), "policy": Reuse(), **options}
    return Engine(model, byte_tokenizer(), **options)


def layer(dtype: torch.dtype, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(256, 192, bias).to(dtype).requires_grad_(False)


def logits(model: Any, count: int = 90) -> Tensor:
    ids = torch.randint(3, 300, (1, count), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: Tensor = model(ids).logits[0]
    return found.float()


def packed_layers(model: Any) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


# ---------------------------------------------------------------------- one layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 47, 48, 100])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("name", ROUNDED)
def test_a_rounded_layer_multiplies_what_it_says(
    name: str, dtype: torch.dtype, rows: int, bias: bool
) -> None:
    form = FORMS[name].from_linear(layer(dtype, bias=bias))
    inputs = torch.randn(2, rows, 256).to(dtype)
    exact = nn.functional.linear(inputs.double(), form.weight.double())
    size = nn.functional.linear(inputs.double().abs(), form.weight.double().abs())
    exact += 0 if form.bias is None else form.bias.double()
    found = form(inputs)
    assert found.dtype == dtype
    assert found.shape == (2, rows, 192)
    # Products and their sum are rounded; what is summed is no larger than `size`.
    assert bool(((found.double() - exact).abs() <= ROUNDING[dtype] * (size + exact.abs())).all())


@pytest.mark.parametrize(("name", "steps"), [("int8", 254), ("int4", 15)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_rounding_is_at_most_half_a_step_of_the_group(
    name: str, steps: int, dtype: torch.dtype
) -> None:
    linear = layer(dtype)
    linear.weight[3] = 0  # an output that nothing reaches
    linear.weight[4] = 0.25
    linear.weight[5] *= 1e-3
    before = linear.weight.double()
    groups = before.view(192, -1, 32 if name == "int4" else 256)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = groups.abs().amax(-1, keepdim=True)
    span = 2 * largest if name == "int8" else high - low
    # Scales and the middle are rounded too, in float16 to multiples of 2**-24 at best.
    least = steps * 2.0**-25 if dtype == FP16 else 0.0
    allowed = 0.5 * span / steps + 2 * ROUNDING[dtype] * largest + least
    found = FORMS[name].from_linear(linear).weight.double().view_as(groups)
    assert bool(((found - groups).abs() <= allowed).all())
    assert bool((found[3] == 0).all())


@needs_bfloat16
@pytest.mark.parametrize("weight_format", ["int8", "int4", "prepacked", "plain"])
def test_rounding_without_a_kernel_warns(
    weight_format: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for has_kernel in (False, True):
        monkeypatch.setattr(linears.rounded_weights, "has_kernel", lambda _, has=has_kernel: has)
        caplog.clear()
        pack_weights(build("llama").to(torch.bfloat16), weight_format)
        is_told = "save memory alone" in caplog.text
        assert is_told == (weight_format.startswith("int") and not has_kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_that_is_rounded_by_parts_is_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(100, 70, bias=False, dtype=dtype)
    whole = Int8Linear.from_linear(linear)
    monkeypatch.setattr(linears, "_ROUNDED", 900)  # nine rows at a time, then seven
    parts = Int8Linear.from_linear(linear)
    assert torch.equal(parts.scales, whole.scales)
    assert torch.equal(parts.integers, whole.integers)


def test_weights_of_q4_1_survive_four_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 16, (64, 8, 32), generator=generator)
    steps[:, :, 0], steps[:, :, 1] = 0, 15  # both extremes are there
    scale = torch.rand(64, 8, 1, generator=generator) * 0.02 + 0.002
    least = -scale * (torch.rand(64, 8, 1, generator=generator) * 15)
    numbers = scale * steps + least  # (64, 8, 32)
    linear = nn.Linear(256, 64, bias=False).to(BF16).requires_grad_(False)
    linear.weight.copy_(numbers.flatten(1))
    found = Int4Linear.from_linear(linear).weight.float().view(64, 8, 32)
    largest = numbers.abs().amax(-1, keepdim=True)
    # What came in is rounded, then scale and middle, then what comes out.
    assert bool(((found - numbers).abs() <= 3 * ROUNDING[BF16] * largest).all())
    # Nearer than half a step: each number is in the step that it was in.
    assert bool(((found - numbers).abs() < 0.5 * scale).all())


@pytest.mark.parametrize("name", ALL)
def test_a_layer_is_copied_pickled_and_made_plain(name: str) -> None:
    form = FORMS[name].from_linear(layer(BF16))
    inputs = torch.randn(3, 256).to(BF16)
    for other in (copy.deepcopy(form), pickle.loads(pickle.dumps(form))):
        assert type(other) is type(form)
        assert torch.equal(other(inputs), form(inputs))
    with torch.no_grad(), pytest.raises(RuntimeError, match="Inplace update"):
        form.weight.mul_(2)  # of a copy: it would be lost
    with pytest.raises(KeyError, match="already exists"):
        form.weight = nn.Parameter(torch.zeros(192, 256))
    plain = form.plain()
    assert type(plain) is nn.Linear
    assert torch.equal(plain.weight, form.weight)
    assert torch.equal(plain.bias, form.bias)
    assert "256, 192, bias=True" in repr(form)


# ---------------------------------------------------------------------- models
@needs_bfloat16
@pytest.mark.parametrize("tied", [False, True])
def test_a_prepacked_model_is_the_plain_one(tied: bool, tmp_path: Path) -> None:
    """As near to exact numbers, of the same name, and the same in a file."""
    plain = make(tied=tied)
    exact = logits(copy.deepcopy(plain).float())
    packed = pack_weights(copy.deepcopy(plain), "prepacked")
    assert len(packed_layers(packed)) == 15
    assert error(logits(packed), exact) <= 1.5 * error(logits(plain), exact)
    engines = make_engine(plain), make_engine(packed)
    assert engines[0].spec == engines[1].spec
    assert engines[0].keys(TEXTS) == engines[1].keys(TEXTS)
    assert packed.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(packed.state_dict()[k], v) for k, v in plain.state_dict().items())
    packed.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert torch.equal(logits(loaded), logits(plain))
    opened = Engine.from_pretrained(tmp_path, tokenizer=byte_tokenizer())
    assert len(packed_layers(opened.model)) == 15
    assert model_identity(unpack_weights(packed)) == model_identity(plain)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_rounded_models_are_models_of_their_own(dtype: torch.dtype) -> None:
    engines = [make_engine(pack_weights(make(dtype), name)) for name in ("plain", *ROUNDED)]
    assert len({engine.spec for engine in engines}) == 3
    assert len({engine.keys(TEXTS)[0].digest for engine in engines}) == 3
    again = make_engine(pack_weights(make(dtype), "int8"))
    assert again.keys(TEXTS) == engines[1].keys(TEXTS)
    assert model_identity(again.model)["weight_format"] == "int8"
    four = engines[2].model
    assert {type(one) for one in packed_layers(four)} == {Int4Linear, Int8Linear}
    assert type(four.lm_head) is Int8Linear


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "deepseek_v3", "gpt_neox"])
def test_stitched_answers_of_rounded_models_obey_the_laws(family: str, name: Any) -> None:
    engine = make_engine(pack_weights(build(family), name))
    assert packed_layers(engine.model)
    full = engine.logits(QUESTION, TEXTS, policy=FullRecompute())
    assert error(full, plain_logits(engine, TEXTS)) < TOLERANCE
    one = engine.logits(QUESTION, TEXTS[1:2], policy=Reuse())
    assert error(one, plain_logits(engine, TEXTS[1:2])) < TOLERANCE
    for scheme in ("reordered", "composite"):
        found = engine.logits(QUESTION, TEXTS, policy=Reuse(positions=scheme))
        assert error(found, masked_logits(engine, TEXTS, scheme)) < TOLERANCE
    single = engine.generate(QUESTION, TEXTS, max_new_tokens=6)
    (batched, _) = engine.generate_batch([(QUESTION, TEXTS), ("x", [])], max_new_tokens=6)
    assert batched.token_ids == single.token_ids


@pytest.mark.parametrize("name", ALL)
def test_unpacking_gives_layers_of_torch_with_the_same_numbers(name: Any) -> None:
    model = pack_weights(make(tied=True, bias=True), name)
    weights = [one.weight for one in packed_layers(model)]
    before = logits(model)
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied), before)
    assert unpack_weights(copied) is copied
    assert not packed_layers(copied)
    linears = [one for one in copied.modules() if type(one) is nn.Linear]
    assert all(map(torch.equal, (one.weight for one in linears), weights))
    assert error(logits(copied), before) < 0.1
    assert len(packed_layers(model)) == 15, "the other one stays packed"
    is_tied = copied.lm_head.weight is copied.model.embed_tokens.weight
    assert is_tied == (name == "prepacked"), "rounded numbers are not those of the embeddings"


def test_a_layer_at_two_places_is_packed_once() -> None:
    model = make(FP32)
    first, second = (block.mlp for block in model.model.layers)
    second.down_proj = first.down_proj
    first.twin = first.down_proj
    expected = logits(model)
    for change in (lambda: pack_weights(model, "int8"), lambda: unpack_weights(model)):
        change()
        assert second.down_proj is first.down_proj is first.twin
        assert error(logits(model), expected) < 0.1


def test_layers_that_are_more_than_a_product_stay() -> None:
    class Other(nn.Linear):
        pass

    model = make(FP32)
    other, hooked = Other(128, 128, bias=False), model.model.layers[1].self_attn.q_proj
    model.model.layers[0].self_attn.q_proj = other
    hooked.register_forward_hook(lambda *_: None)
    pack_weights(model, "int8")
    assert model.model.layers[0].self_attn.q_proj is other
    assert model.model.layers[1].self_attn.q_proj is hooked
    assert len(packed_layers(model)) == 13


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_however_they_are_kept(tied: bool) -> None:
    count = make(tied=tied).num_parameters()
    for name in ("plain", *ROUNDED):
        assert parameter_count(pack_weights(make(tied=tied), name)) == count


# ---------------------------------------------------------------------- writes, moves, files
@pytest.mark.parametrize("name", ALL)
def test_writes_beside_packed_layers_are_noticed(name: Any) -> None:
    model = pack_weights(make(), name)
    weights = Weights(model)
    before = weights.identity
    assert weights.are_unchanged()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    assert not weights.are_unchanged()
    assert weights.follow() != before
    assert weights.are_unchanged()


@pytest.mark.parametrize("name", ALL)
def test_a_packed_layer_that_is_exchanged_is_noticed(name: Any) -> None:
    model = pack_weights(make(), name)
    weights, block = Weights(model), model.model.layers[0].self_attn
    seen = [weights.identity]
    for seed in (1, 2):
        linear = nn.Linear(128, 128, bias=False).to(BF16).requires_grad_(False)
        linear.weight.copy_(torch.randn(128, 128, generator=torch.Generator().manual_seed(seed)))
        block.q_proj = FORMS[name].from_linear(linear)
        assert not weights.are_unchanged()
        seen.append(weights.follow())
    assert seen[0] != seen[1] != seen[2] != seen[0]
    unpack_weights(model)
    assert not weights.are_unchanged()


@pytest.mark.parametrize("name", ALL)
def test_an_engine_follows_when_its_model_is_packed(name: Any) -> None:
    engine = make_engine(make())
    engine.add(TEXTS)
    before = engine.keys(TEXTS)
    pack_weights(engine.model, name)
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=2)
    fresh = make_engine(engine.model)
    assert answer.token_ids == fresh.generate(QUESTION, TEXTS, max_new_tokens=2).token_ids
    assert name == "prepacked" or not {*engine.keys(TEXTS)} & {*before}


@pytest.mark.parametrize("name", ALL)
def test_a_packed_model_stays_on_the_processor_in_its_dtype(name: Any) -> None:
    model = pack_weights(make(), name)
    before = logits(model)
    assert model.to("cpu") is model
    assert torch.equal(logits(model), before)
    assert model.to(BF16) is model
    for move in (FP32, "meta", FP16):
        with pytest.raises(InvalidInputError, match=r"there, in torch\.bfloat16; load"):
            copy.deepcopy(model).to(move)


@pytest.mark.parametrize("name", ALL)
def test_a_second_engine_on_the_processor_shares_packed_weights(name: Any) -> None:
    engine = make_engine(pack_weights(make(), name))
    second = twin(engine, "cpu")
    assert second.model is not engine.model
    assert second.spec == engine.spec
    assert error(second.logits(QUESTION, TEXTS), engine.logits(QUESTION, TEXTS)) < TOLERANCE
    mine, other = packed_layers(engine.model)[0], packed_layers(second.model)[0]
    for where in ("_packed", "integers", "packed"):
        assert getattr(mine, where, None) is getattr(other, where, None)
    with pytest.raises(InvalidInputError, match="cannot be copied to 'meta'"):
        twin(engine, "meta")


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_weights_are_not_saved(name: Any, tmp_path: Path) -> None:
    model = pack_weights(make(), name)
    for save in (model.state_dict, lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(InvalidInputError, match=r"are not saved.*unpack_weights"):
            save()
    assert not [*tmp_path.glob("*.safetensors")]
    unpack_weights(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_a_packed_model_takes_no_other_weights_in(name: Any, strict: bool) -> None:
    with pytest.raises(InvalidInputError, match="take no others in"):
        pack_weights(make(), name).load_state_dict(make().state_dict(), strict=strict)


# ---------------------------------------------------------------------- what is meant
def test_auto_packs_what_gains_and_leaves_what_is_given() -> None:
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert bool(packed_layers(pack_weights(make()))) == supported
    for left in (make(FP32), quantised()):
        assert not packed_layers(pack_weights(left))
    given = make()
    assert open_engine(given, byte_tokenizer()).model is given
    assert not packed_layers(given)
    for options in ({"weight_format": "int8"}, {}):
        open_engine(given, byte_tokenizer(), **options)
        assert type(given.lm_head) is Int8Linear


@needs_bfloat16
def test_prepacked_weights_become_plain_ones_where_these_are_asked_for() -> None:
    model, expected = make(tied=True), model_identity(make(tied=True))
    for _ in range(2):
        assert packed_layers(pack_weights(model, "prepacked"))
        assert packed_layers(pack_weights(model, "prepacked")), "asked for twice"
        assert packed_layers(pack_weights(model)), "auto leaves what is packed"
        assert not packed_layers(pack_weights(model, "plain"))
        assert model_identity(model) == expected
    pack_weights(pack_weights(model), "int8")
    assert model_identity(model) == model_identity(pack_weights(make(tied=True), "int8"))


def quantised() -> Any:
    model = make()
    model.hf_quantizer = object()
    return model


@pytest.mark.parametrize(
    ("model", "form", "words"),
    [
        (make, "int2", "'auto', 'plain', 'prepacked', 'int8', 'int4'"),
        (lambda: make(FP32), "prepacked", "prepacked weights are for bfloat16"),
        (lambda: make(torch.float64), "int8", "no linear layer of the model can be int8"),
        (lambda: make().to("meta"), "int8", "for CPUs; on meta"),
        (lambda: pack_weights(make(), "int8"), "int4", "int8 already; load it again for int4"),
        (lambda: pack_weights(make(), "int8"), "plain", "int8 already; load it again for plain"),
        (quantised, "int4", "quantised by transformers already"),
    ],
)
def test_a_form_that_is_none_for_the_model_is_refused_before_anything_is_changed(
    model: Any, form: Any, words: str
) -> None:
    given = model()
    before = packed_layers(given)
    with pytest.raises(InvalidInputError, match=words):
        pack_weights(given, form)
    assert packed_layers(given) == before


@pytest.mark.parametrize(("name", "form"), [("no/such", "int2"), ("tiny", "Q4")])
def test_a_form_that_there_is_not_is_told_before_the_model_is_looked_for(
    name: str, form: Any
) -> None:
    with pytest.raises(InvalidInputError, match="weight_format must be one of"):
        Engine.from_pretrained(name, weight_format=form)


def test_an_adapter_that_can_be_switched_needs_plain_weights(tmp_path: Path) -> None:
    model = get_peft_model(make(), LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    for one in (model, model.get_base_model()):
        with pytest.raises(InvalidInputError, match="adapter that can be switched needs"):
            pack_weights(one, "int8")
        assert not packed_layers(pack_weights(one))
    options: dict[str, Any] = {"tokenizer": byte_tokenizer(), "adapter": tmp_path}
    with pytest.raises(InvalidInputError, match="name the model and its adapter"):
        open_engine(make(), weight_format="int8", **options)
    with pytest.raises(InvalidInputError, match="are int8 already; load it again for plain"):
        open_engine(pack_weights(make(), "int8"), **options)
    assert packed_layers(pack_weights(model.merge_and_unload(), "int8"))


@needs_bfloat16
def test_a_prepacked_model_takes_an_adapter_as_the_plain_one(tmp_path: Path) -> None:
    get_peft_model(make(), LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path)
    engines = [
        open_engine(model, byte_tokenizer(), adapter=tmp_path)
        for model in (make(), pack_weights(make()))
    ]
    assert not packed_layers(engines[1].model)
    assert torch.equal(logits(engines[0].model), logits(engines[1].model))


def test_an_adapter_is_merged_before_weights_are_packed(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    make(FP32).save_pretrained(base)
    model = get_peft_model(make(FP32), LoraConfig(r=4, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    model.save_pretrained(folder)
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "weight_format": "int8"}
    adapted = Engine.from_pretrained(base, adapter=folder, **common)
    expected = make_engine(pack_weights(model.merge_and_unload(), "int8"))
    assert error(logits(adapted.model), logits(expected.model)) < TOLERANCE
    assert adapted.keys(TEXTS) != Engine.from_pretrained(base, **common).keys(TEXTS)


@pytest.mark.parametrize("name", ALL)
def test_an_adapter_for_questions_is_packed_beside_the_model(name: Any, tmp_path: Path) -> None:
    model = get_peft_model(make(bias=True), LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    with torch.no_grad():
        for weight_name, parameter in model.named_parameters():
            if "lora_B" in weight_name:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    write_training(tmp_path, on_question=True)
    plain = put_question_adapter(make(bias=True), tmp_path, "m")
    packed = pack_weights(put_question_adapter(make(bias=True), tmp_path, "m"), name)
    later = put_question_adapter(pack_weights(make(bias=True)), tmp_path, "m")
    ids = torch.arange(3, 12)[None]
    found = {}
    for kind, one in {"plain": plain, "packed": packed, "later": later}.items():
        adapter = question_adapter(one)
        assert adapter is not None
        without = logits(one)
        with acting(adapter), torch.no_grad():
            found[kind] = one(ids).logits.float()
        assert torch.equal(logits(one), without)
    assert error(found["packed"], found["plain"]) < {"prepacked": 0.05, "int8": 0.1}.get(name, 0.5)
    assert error(found["later"], found["plain"]) < 0.05
    with acting(question_adapter(packed)):
        layer = packed.model.layers[0].self_attn.q_proj
        assert isinstance(layer.forward._other, FORMS[name])
    spoken = [make_engine(one).logits(QUESTION, TEXTS) for one in (plain, packed)]
    assert error(spoken[1], spoken[0]) < {"prepacked": 0.05, "int8": 0.1}.get(name, 0.5)
    unpack_weights(packed)
    assert isinstance(packed.model.layers[0].self_attn.q_proj.forward._other, nn.Linear)
