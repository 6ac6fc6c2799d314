"""Law 7: a key is the same exactly when tokens, spec, prefix and namespace are."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_rag.kv.chunk import (
    ChunkKey,
    ChunkKV,
    ChunkLayout,
    GroupLayout,
    canonical_json,
    chunk_key,
    digest,
    spec_digest,
)
from tests.chunks import LAYOUTS

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
SPECS = st.sampled_from([spec_digest({"model": name}) for name in "abc"])
PARTS = st.tuples(IDS, IDS, SPECS, st.text(max_size=4))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def key(parts: tuple[list[int], list[int], str, str]) -> ChunkKey:
    ids, prefix, spec, namespace = parts
    return chunk_key(ids, prefix_ids=prefix, spec=spec, namespace=namespace)


@settings(max_examples=200)
@given(PARTS, PARTS)
def test_law_7_keys_are_equal_exactly_when_their_parts_are(one: Any, other: Any) -> None:
    assert (key(one).digest == key(other).digest) == (one == other)
    assert (key(one) == key(other)) == (one == other)
    assert key(one) == key(one)


@settings(max_examples=200)
@given(IDS, st.integers(0, 6), st.integers(0, 6))
def test_moving_the_border_between_prefix_and_chunk_gives_another_key(
    ids: list[int], first: int, second: int
) -> None:
    first, second = min(first, len(ids)), min(second, len(ids))
    spec = spec_digest({})
    one = key((ids[first:], ids[:first], spec, ""))
    other = key((ids[second:], ids[:second], spec, ""))
    assert (one.digest == other.digest) == (first == second)


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=5), max_size=4), st.lists(st.binary(max_size=5), max_size=4))
def test_length_prefixes_keep_joined_fields_apart(one: list[bytes], other: list[bytes]) -> None:
    assert (digest("tag", *one) == digest("tag", *other)) == (one == other)
    assert digest("tag", *one) != digest("other tag", *one)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=5))
def test_the_order_in_which_a_spec_was_written_does_not_matter(spec: dict[str, Any]) -> None:
    turned = dict(reversed(spec.items()))
    assert canonical_json(spec) == canonical_json(turned)
    assert spec_digest(spec) == spec_digest(turned)


def test_canonical_json_is_the_same_ascii_bytes_everywhere() -> None:
    value = {"b": [1, {"z": None, "a": True}], "ä": "\u2028€", "a": 0.5}
    expected = rb'{"a":0.5,"b":[1,{"a":true,"z":null}],"\u00e4":"\u2028\u20ac"}'
    assert canonical_json(value) == expected
    assert spec_digest({"a": 1}) != spec_digest({"a": "1"}) != spec_digest({"a": 1.0})


def test_keys_are_the_same_in_every_process() -> None:
    code = (
        "from kvcache_rag.kv.chunk import chunk_key, spec_digest\n"
        "spec = spec_digest({'model': 'é', 'layers': {'b': 1, 'a': [2]}})\n"
        "print(chunk_key([1, 2, 2**31 - 1], prefix_ids=[7], spec=spec, namespace='n').digest)"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    spec = spec_digest({"layers": {"a": [2], "b": 1}, "model": "é"})
    here = chunk_key([1, 2, 2**31 - 1], prefix_ids=[7], spec=spec, namespace="n").digest
    assert elsewhere == here
    # Written down, so that a change of the format cannot pass unnoticed.
    assert here == "dcd23ab4cf93530a43b2e93708389c4e0db4b7ff9acc522d1806baecd7c4d4d9"


@pytest.mark.parametrize("fused", [True, False])
def test_a_layout_knows_names_shapes_and_bytes(fused: bool) -> None:
    group = GroupLayout((0, 2), (2, 8), (2, 8) if fused else (1, 4))
    layout = ChunkLayout((group,), torch.bfloat16)
    (tensors,) = layout.empty(5)
    assert layout.names() == ((("kv",) if fused else ("k", "v")),)
    assert [tuple(tensor.shape) for tensor in tensors] == list(group.shapes(5))
    assert sum(tensor.nbytes for tensor in tensors) == layout.nbytes(5)
    chunk = ChunkKV(layout, torch.zeros(5, dtype=torch.int32), 3, (tensors,))
    assert len(chunk) == 5
    assert chunk.nbytes == layout.nbytes(5)
    assert chunk.keys(0).shape == (2, 2, 5, 8)
    assert chunk.values(0).shape == ((2, 2, 5, 8) if fused else (2, 1, 5, 4))
    chunk.keys(0).fill_(1.0)
    chunk.values(0).fill_(2.0)
    assert float(chunk.keys(0).float().mean()) == 1.0, "K and V must be memory of their own"


def test_several_groups_have_numbered_names() -> None:
    assert LAYOUTS["mixed-float16"].names() == (("kv.0",), ("k.1", "v.1"), ("kv.2",))
