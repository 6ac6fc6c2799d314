"""Attention with chunks weighed against the rest, held to the formula of the paper in float64."""

from __future__ import annotations

from typing import Any

import access
import pytest
import torch
from torch import Tensor
from zoo import BY_PLACE, FAMILIES, OWN_ATTENTION, SEVERAL, build

from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.models.attention import scaled as module
from kvcache_rag.models.attention.scaled import (
    Weighting,
    ensure_weighable,
    scaled_attention,
    weighed_chunks,
)
from kvcache_rag.models.hf import TransformersModel

LAYER = torch.nn.Module()
PLAIN = Weighting(1.0, 1.0, ((3, 9),))


def two_sets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    chunk: Tensor,
    weighting: Weighting,
    *,
    factor: float,
    softcap: float | None = None,
    sink: Tensor | None = None,
    merge: torch.dtype = torch.float64,
) -> Tensor:
    """The formula as it is written, query by query and head by head: O_c, L_c, O_o, L_o, merge.

    Of tensors as models hand them over, `seen` of `(rows, queries, tokens)` and `chunk` of
    `(rows, tokens)`; L_c and L_o are rounded to `merge` before they are compared.  Gives
    `(rows, queries, heads, width)` float64; zeros where nothing is seen.
    """
    rows, heads, queries, _ = query.shape
    output = torch.zeros(rows, queries, heads, value.shape[-1], dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            group = head * key.shape[1] // heads
            keys, values = key[row, group].double(), value[row, group].double()
            for place in range(queries):
                scores = keys @ query[row, head, place].double() * factor
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                inside = seen[row, place] & chunk[row]
                outside = seen[row, place] & ~chunk[row]
                hot, rest = scores[inside] / weighting.temperature, scores[outside]
                if sink is not None:
                    rest = torch.cat([rest, sink[head].double()[None]])
                if not len(hot) and not len(rest):
                    continue
                out_c = torch.softmax(hot, 0) @ values[inside]
                weights = torch.softmax(rest, 0)
                out_o = (weights if sink is None else weights[:-1]) @ values[outside]
                level = weighting.scale * weighting.temperature * torch.logsumexp(hot, 0)
                if not len(hot):
                    level = torch.tensor(-torch.inf)
                pair = torch.stack([level.to(merge), torch.logsumexp(rest, 0).to(merge)])
                merged = torch.softmax(pair, 0).double()
                output[row, place, head] = merged[0] * out_c + merged[1] * out_o
    return output


def tensors(
    rows: int, queries: int, tokens: int, *, heads: int = 4, groups: int = 2, size: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + queries + tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query = size * draw(rows, heads, queries, 16)
    return query, size * draw(rows, groups, tokens, 16), draw(rows, groups, tokens, 16)


def masks(
    rows: int, queries: int, tokens: int, window: int | None, spans: Any
) -> tuple[Tensor, Tensor]:
    """What each query sees, `(rows, queries, tokens)`, and which columns are chunks."""
    place = torch.arange(tokens)
    here = torch.arange(tokens - queries, tokens)
    seen = place <= here[:, None]
    if window is not None:
        seen &= place > here[:, None] - window
    seen = seen.expand(rows, -1, -1).clone()
    chunk = torch.stack([(place >= start) & (place < stop) for start, stop in spans])
    return seen, chunk


def weighed(weighting: Weighting, *arguments: Any, **options: Any) -> Tensor:
    token = module.IN_FORCE.set(weighting)
    try:
        output, _ = scaled_attention(LAYER, *arguments, **options)
    finally:
        module.IN_FORCE.reset(token)
    return output


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one query": {"queries": 1},
    "window": {"window": 8},
    "window behind the chunks": {"window": 2},
    "no groups": {"groups": 4},
    "one KV head": {"groups": 1},
    "softcap": {"softcap": 2.0},
    "sinks": {"sink": True},
    "sinks and window": {"sink": True, "window": 2},
    "factor": {"factor": 0.7},
}


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("temperature", "scale"), [(1, 1), (0.6, 1.3), (2, 0.25)])
def test_the_function_is_the_formula(
    case: str, temperature: float, scale: float, additive: bool
) -> None:
    options = CASES[case]
    rows, queries, tokens = 2, options.get("queries", 5), 17
    weighting = Weighting(temperature, scale, ((2, 9), (5, 11)))
    query, key, value = tensors(rows, queries, tokens, groups=options.get("groups", 2))
    seen, chunk = masks(rows, queries, tokens, options.get("window"), weighting.columns)
    seen[1, :, :3] = False  # padding
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0]) if "sink" in options else None
    mask = seen[:, None]
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    shared: dict[str, Any] = {"softcap": options.get("softcap")}
    factor = options.get("factor")
    found = weighed(
        weighting, query, key, value, mask, scaling=factor, s_aux=sink, **shared
    ).double()
    expected = two_sets(
        query, key, value, seen, chunk, weighting, factor=factor or 0.25, sink=sink, **shared
    )
    assert (found - expected).abs().max() < 1e-5
    plain = two_sets(
        query, key, value, seen, chunk, PLAIN, factor=factor or 0.25, sink=sink, **shared
    )
    moved = (plain - expected).abs().max()
    hidden = options.get("window") == 2
    assert moved < 1e-12 if (temperature, scale) == (1, 1) or hidden else moved > 1e-2


def test_rows_that_see_nothing_give_zeros_and_beams_share_their_rows_columns() -> None:
    weighting = Weighting(0.7, 0.9, ((1, 4), (3, 8)))
    query, key, value = tensors(4, 2, 10)
    seen, chunk = masks(4, 2, 10, None, [(1, 4), (1, 4), (3, 8), (3, 8)])
    seen[1, 0] = False
    found = weighed(weighting, query, key, value, seen[:, None])
    expected = two_sets(query, key, value, seen, chunk, weighting, factor=0.25)
    assert (found.double() - expected).abs().max() < 1e-5
    assert not found[1, 0].any()


def test_long_queries_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weighting, given = Weighting(0.7, 0.9, ((1, 4),)), tensors(1, 7, 12)
    windowed, causal = (masks(1, 7, 12, window, [(1, 4)])[0][:, None] for window in (6, None))
    whole = [weighed(weighting, *given, mask) for mask in (windowed, causal)]
    monkeypatch.setattr(module, "MAX_SCORES", 2 * 4 * 12)
    for mask, expected in ((windowed, whole[0]), (causal, whole[1]), (None, whole[1])):
        assert torch.allclose(weighed(weighting, *given, mask), expected, atol=1e-6)


def test_bfloat16_is_merged_in_float32() -> None:
    weighting = Weighting(0.9, 1.0, ((8, 200),))
    query, key, value = (one.bfloat16() for one in tensors(1, 16, 216, size=3.0))
    seen, chunk = masks(1, 16, 216, None, weighting.columns)

    def reference(merge: torch.dtype) -> Tensor:
        return two_sets(query, key, value, seen, chunk, weighting, factor=0.25, merge=merge)

    exact = reference(torch.float64)
    found = weighed(weighting, query, key, value, seen[:, None])
    assert found.dtype == torch.bfloat16
    # One rounding of the output to 8 bits, and nothing else.
    allowed = exact.abs() * 2**-8 + 1e-5
    assert bool(((found.double() - exact).abs() <= allowed).all())
    assert not bool(((reference(torch.bfloat16) - exact).abs() <= 5 * allowed).all())


def test_arguments_it_does_not_know_are_refused() -> None:
    given = tensors(1, 2, 10)
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        weighed(PLAIN, *given, None, position_bias=torch.zeros(1))
    seen, _ = masks(1, 2, 10, None, [(3, 9)])
    slopes = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    weighed(PLAIN, *given, slopes[:, None])
    slopes[0, 0, 0] = -0.5
    with pytest.raises(UnsupportedModelError, match="adds to scores"):
        weighed(PLAIN, *given, slopes[:, None])
    with pytest.raises(InvalidInputError, match="a batch of 1 rows is none of 2 prompts"):
        weighed(Weighting(0.9, 0.9, ((1, 2), (3, 4))), *given, None)


def test_far_apart_scores_are_neither_lost_nor_infinite() -> None:
    # Keys with a bias give scores of hundreds, chunks and rest 100 apart.
    weighting = Weighting(0.9, 0.8, ((2, 9),))
    query, key, value = tensors(1, 3, 12)
    seen, chunk = masks(1, 3, 12, None, weighting.columns)
    for size in (-400.0, 150.0, 400.0):
        query[..., 0], key[..., 0] = 1.0, 4 * size * torch.where(chunk[:, None], 1.0, 0.7)
        found = weighed(weighting, query, key, value, seen[:, None])
        expected = two_sets(query, key, value, seen, chunk, weighting, factor=0.25)
        assert (found.double() - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in FAMILIES), *((name, torch.bfloat16) for name in SEVERAL)],
    ids=str,
)
def test_every_family_but_those_with_attention_of_their_own(name: str, dtype: torch.dtype) -> None:
    model = TransformersModel(build(name, dtype=dtype))
    before = access.attention(model.model.config)
    if name in (*OWN_ATTENTION, *BY_PLACE):
        with pytest.raises(UnsupportedModelError, match=r"^\w+: its attention does not go"):
            ensure_weighable(model)
    else:
        ensure_weighable(model)
    assert access.attention(model.model.config) == before


def test_a_model_that_attends_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TransformersModel(build("gemma2"))  # its softcap must reach the function

    def forgets(*arguments: Any, **options: Any) -> Any:
        return scaled_attention(*arguments, **{**options, "softcap": 0.1})

    monkeypatch.setattr(module, "scaled_attention", forgets)
    with pytest.raises(UnsupportedModelError, match="differs from plain attention"):
        ensure_weighable(model)


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss", "gemma3"])
def test_the_models_own_attention_comes_back_after_an_error(name: str) -> None:
    model = TransformersModel(build(name))
    given = torch.arange(5, 25)[None], None, torch.arange(20)
    before, own = model.forward(*given), access.attention(model.model.config)

    def fails() -> None:
        with weighed_chunks(model, 0.5, 0.9, [(3, 9)]):
            assert not torch.allclose(model.forward(*given), before, atol=1e-3)
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        fails()
    assert access.attention(model.model.config) == own
    assert module.IN_FORCE.get() is None
    assert torch.equal(model.forward(*given), before)
