"""The bytes of a state: read and written as llama.cpp does it, and refused in any other form."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import QUESTION, TEXTS
from llamacpp.asking import ids_of, opened
from llamacpp.ggufs import FAMILIES, WINDOW
from llamacpp.own import TYPES

from kvcache_rag import BestFew, FullRecompute, LegoLink, Reuse
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.models.rotation import KeyRotation
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag_llamacpp.binding import LlamaCpp, LlamaCppError
from kvcache_rag_llamacpp.state import MAGIC, StateFormat, read_state_format

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamacpp.conftest import Decoder, Files
    from llamacpp.own import Own

    from kvcache_rag_llamacpp.state import SequenceState

IDS = [40, 41, 42, 43, 50, 60, 70]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def form(family: str, data: bytearray, dtype: str = "float32") -> StateFormat:
    head = FAMILIES[family].head
    return read_state_format(data, [[head], [head]], getattr(torch, dtype), TYPES[dtype])


def rewritten(state: SequenceState) -> bytearray:
    """The same keys and values, written anew."""
    again = state.form.write(state.positions(0))
    for group in range(len(state.parts)):
        again.keys(group).copy_(state.keys(group))
        again.values(group).copy_(state.values(group))
    return again.data


# ---------------------------------------------------------------------- as llama.cpp does it
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_read_and_written_is_the_same_bytes(
    family: str, files: Files, own: Decoder, dtype: str, flash: bool
) -> None:
    alone: Own = own(files(family), dtype=dtype, flash=flash)
    written = alone.state(IDS, first=5)
    known = form(family, written, dtype)
    windows = FAMILIES[family].values.get("attention.sliding_window", 0)
    assert len(known.groups) == (2 if windows else 1)
    assert sum(len(group.layers) for group in known.groups) == FAMILIES[family].layers
    assert known.transposed is not flash
    again = rewritten(known.read(written))
    again[4:8] = written[4:8]  # its sequence
    again = _with_sequences(again, known, 0)
    assert again == written
    assert alone.takes(again) == written


def _with_sequences(data: bytearray, known: StateFormat, sequence: int) -> bytearray:
    """A state whose cells say that they are of this sequence."""
    found, place = bytearray(data), 8
    state = known.read(data)
    for group in range(len(known.groups)):
        cells = len(state.positions(group))
        for cell in range(cells):
            struct.pack_into("<i", found, place + 8 + 12 * cell + 8, sequence)
        layout = known.groups[group]
        width = sum(heads * size for heads, size in (layout.key_shape, layout.value_shape))
        numbers = cells * width * known.dtype.itemsize
        place += 8 + 12 * cells + 8 + len(layout.layers) * (24 + numbers)
    return found


def test_other_positions_are_written_where_they_belong(
    family: str, files: Files, own: Decoder
) -> None:
    alone: Own = own(files(family))
    known = form(family, alone.state(IDS))
    far = known.write([3, 9, 4, 100], 0)
    for group in range(len(known.groups)):
        far.keys(group).copy_(torch.randn(far.keys(group).shape))
        far.values(group).copy_(torch.randn(far.values(group).shape))
    read = known.read(far.data)
    assert read.positions(0) == (3, 9, 4, 100)
    assert torch.equal(read.values(0), far.values(0))
    assert alone.takes(far.data) is not None


def test_layers_with_a_window_have_its_tokens_alone(files: Files, own: Decoder) -> None:
    """Why chunks are read in parts of no more than a window (`LlamaCppModel._prefilled`)."""
    alone: Own = own(files("cohere2"))
    known = form("cohere2", alone.state(IDS))
    state = known.read(alone.state([40] * 3 * WINDOW))
    sizes = sorted(len(state.positions(group)) for group in range(2))
    assert sizes == [WINDOW, 3 * WINDOW]


# ---------------------------------------------------------------------- other forms
def _header(known: StateFormat, cells: int) -> dict[str, list[int]]:
    """Where the numbers of a state stand that are no keys and values, by what they say."""
    places: dict[str, list[int]] = {"magic": [*range(4)], "sequence": [*range(4, 8)]}

    def add(name: str, place: int, size: int) -> int:
        places.setdefault(name, []).extend(range(place, place + size))
        return place + size

    place = 8
    for group in known.groups:
        place = add("streams", place, 4)
        place = add("cells", place, 4)
        for _ in range(cells):
            place = add("position", place, 4)
            place = add("sequences of a cell", place, 4)
            place = add("sequence", place, 4)
        place = add("transposed", place, 4)
        place = add("layers", place, 4)
        for shape in (group.key_shape, group.value_shape):
            for _ in group.layers:
                place = add("type", place, 4)
                place = add("row", place, 8)
                place += cells * shape[0] * shape[1] * known.dtype.itemsize
    return places


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("family", ["llama", "cohere2"])
def test_another_form_is_refused(family: str, files: Files, own: Decoder, flash: bool) -> None:
    """Law: any bit of a number that is no key, value, place or sequence makes it another form."""
    written = own(files(family), flash=flash).state(IDS)
    known = form(family, written)
    for name, places in _header(known, len(IDS)).items():
        for place in places:
            for bit in range(8):
                spoilt = bytearray(written)
                spoilt[place] ^= 1 << bit
                if name in ("position", "sequence"):
                    state = known.read(spoilt)
                    assert torch.equal(state.keys(0), known.read(written).keys(0))
                    continue
                with pytest.raises(UnsupportedModelError, match=r"^a state of llama.cpp "):
                    known.read(spoilt)


@pytest.mark.parametrize("family", ["llama", "cohere2"])
def test_a_state_of_another_length_is_refused(family: str, files: Files, own: Decoder) -> None:
    written = own(files(family)).state(IDS)
    known, lengths = form(family, written), [*range(64), *range(64, len(written), 97)]
    others = [written[:length] for length in [*lengths, len(written) - 1]]
    for state in (*others, *(written + more for more in (b"\0", b"\0" * 64, written))):
        with pytest.raises(UnsupportedModelError):
            known.read(state)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=400), is_begun=st.booleans())
def test_whatever_bytes_there_are_are_refused(data: bytes, is_begun: bool) -> None:
    begun = struct.pack("<IiII", MAGIC, 0, 1, 2) + struct.pack("<iIi", 0, 1, 0) * 2
    with pytest.raises(UnsupportedModelError):
        read_state_format(
            bytearray((begun if is_begun else b"") + data), [[8], [8]], torch.float32, 0
        )


# ---------------------------------------------------------------------- a llama.cpp of another form
def _flag(place: int, value: int) -> Callable[[bytearray], bytearray]:
    def change(state: bytearray) -> bytearray:
        struct.pack_into("<I", state, place, value)
        return state

    return change


CHANGED: dict[str, Callable[[bytearray], bytearray]] = {
    "another magic": _flag(0, 7),
    "without a magic": lambda state: state[4:],
    "a version in front": lambda state: bytearray(struct.pack("<I", 3)) + state,
    "something behind": lambda state: state + b"\0" * 16,
    "a checksum for each cache": lambda state: state[:8] + b"\0" * 4 + state[8:],
    "several streams": _flag(8, 2),
    "cut": lambda state: state[:-1],
    "values that lie otherwise": lambda state: _flag(8 + 8 + 12 * _cells(state), 0)(state),
    "nothing": lambda state: bytearray(),
}


def _cells(state: bytearray) -> int:
    cells: int = struct.unpack_from("<I", state, 12)[0]
    return cells


@pytest.mark.parametrize("changed", CHANGED)
def test_a_llama_cpp_that_writes_another_form_is_refused_when_it_is_loaded(
    files: Files, own: Decoder, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: then no state is handed to it, and the best few are answered by full prefill."""
    real, handed = LlamaCpp.state, list[int]()
    monkeypatch.setattr(
        LlamaCpp, "state", lambda self, sequence: CHANGED[changed](real(self, sequence))
    )
    monkeypatch.setattr(LlamaCpp, "set_state", lambda self, sequence, state: handed.append(1))
    engine = opened(files("llama"))
    assert "\n" not in engine.refusal
    assert "llama.cpp" in engine.refusal
    with pytest.warns(UserWarning, match="answers by full prefill"):
        answer = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    few = [TEXTS[at] for at in BestFew().plan(Retrieved(QUESTION, tuple(TEXTS))).order]
    said, _ = own(files("llama")).answer([], [], [*ids_of(engine, few).all], 4)
    assert [*answer.token_ids] == said
    with pytest.raises(UnsupportedModelError, match=r"use FullRecompute\(\)"):
        engine.generate(QUESTION, TEXTS, policy=Reuse())
    with pytest.raises(UnsupportedModelError):
        engine.add(TEXTS)
    assert not handed


def test_a_form_that_changes_later_reaches_nobody(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: what is read then fails, and what is written is of the form that was learned."""
    engine = opened(files("llama"))
    engine.add(TEXTS[:1])
    real = LlamaCpp.state
    monkeypatch.setattr(LlamaCpp, "state", lambda self, sequence: real(self, sequence)[:-4])
    with pytest.raises(UnsupportedModelError, match="its form is unknown"):
        engine.generate(QUESTION, TEXTS, policy=LegoLink(3))
    assert engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=2).token_ids
    monkeypatch.undo()
    assert engine.generate(QUESTION, TEXTS, policy=LegoLink(3), max_new_tokens=2).token_ids


def test_chunks_that_are_not_what_is_computed_there_are_refused(
    family: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: what is brought elsewhere is compared with what llama.cpp computes there, at load."""
    assert not opened(files(family)).refusal

    def mixed(self: KeyRotation, part: Any, source: Any) -> None:
        for group in range(len(self.slots)):
            part.keys(group).copy_(source.values(group))
            part.values(group).copy_(source.keys(group))

    monkeypatch.setattr(KeyRotation, "copy_rotated", mixed)
    assert "is not what llama.cpp computes there" in opened(files(family)).refusal

    def refuse(self: LlamaCpp, sequence: int, state: bytearray) -> None:
        raise LlamaCppError("llama.cpp could not read the state of a sequence")

    monkeypatch.setattr(LlamaCpp, "set_state", refuse)
    assert opened(files(family)).refusal.endswith(
        ": llama.cpp could not read the state of a sequence"
    )
