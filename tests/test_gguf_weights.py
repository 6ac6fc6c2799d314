"""What becomes of a GGUF file tensor by tensor is what transformers makes of it as a whole."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from kvcache_rag import InvalidInputError
from kvcache_rag.models import gguf as files
from kvcache_rag.models import gguf_weights as weights

pytest.importorskip("gguf", reason="pip install 'kvcache-rag[gguf]'")

import gguf
from gguf_files import TOKENS, quantised, write_architecture, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = "model.safetensors"

# By llama.cpp's name: what of a file is not as in others.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tied": True},
    "llama uncounted": {"vocab_size": None},
    "qwen2": {},
    "qwen2 uncounted": {"vocab_size": None},
    "qwen2moe": {},
    "qwen3": {},
    "qwen3moe": {},
    "falcon": {"attention_head_count_kv": 1},
    "phi3": {"attention_head_count_kv": 4},
    "bloom": {},
    "stablelm": {},
    "gpt2": {},
    "starcoder2": {},
    "mamba": {},
    "nemotron": {},
    "gemma2": {"tied": True},
    "gemma3": {"tied": True},
    "gemma4": {"tied": True, "ending": ""},  # as transformers looks for them
    "minimax-m2": {},
}


def is_read(architecture: str) -> bool:
    """Whether the installed versions read files of an architecture at all."""
    by_gguf = architecture in gguf.MODEL_ARCH_NAMES.values()
    return by_gguf and (architecture != "gemma4" or architecture in GGUF_SUPPORTED_ARCHITECTURES)


def written(folder: Path, case: str, **more: Any) -> Path:
    return write_architecture(
        folder / "model.gguf", case.split()[0], **{**ARCHITECTURES[case], **more}
    )


def saved(path: Path, dtype: torch.dtype, folder: Path) -> tuple[Path, Path]:
    """Checkpoints as we and as transformers make them."""
    header = files.GgufHeader.read(path)
    own = weights.model_of(path, header, dtype, {})
    assert own is not None, "tensor by tensor"
    own.save_pretrained(folder / "own")
    files._by_transformers(path, dtype, {}).save_pretrained(folder / "whole")
    return folder / "own", folder / "whole"


def check_same(own: Path, whole: Path) -> None:
    assert {path.name for path in own.iterdir()} == {path.name for path in whole.iterdir()}
    for path in sorted(own.glob("*.json")):
        assert json.loads(path.read_text()) == json.loads((whole / path.name).read_text())
    found, expected = (load_file(folder / WEIGHTS) for folder in (own, whole))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    assert (own / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ARCHITECTURES)
def test_law_a_model_is_the_one_of_transformers(
    tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    if not is_read(case.split()[0]):
        pytest.skip("this transformers, or this gguf, does not read it")
    check_same(*saved(written(tmp_path, case), dtype, tmp_path))


def test_scales_of_layers_are_found_as_llama_cpp_names_them(tmp_path: Path) -> None:
    """In files they end in `.weight`, which transformers does not look for and leaves out."""
    if not is_read("gemma4"):
        pytest.skip("this transformers, or this gguf, does not read it")
    found = []
    for number, ending in enumerate(("", ".weight")):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write_architecture(folder / "model.gguf", "gemma4", tied=True, ending=ending)
        model = weights.model_of(path, files.GgufHeader.read(path), torch.float32, {})
        found.append(model.state_dict())
    assert any("layer_scalar" in name for name in found[0])
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_law_files_of_floats_and_of_one_without_a_tokenizer(tmp_path: Path) -> None:
    for name, options in {"floats": {"quantised": False}, "bare": {"tokenizer": False}}.items():
        folder = tmp_path / name
        folder.mkdir()
        check_same(*saved(write_gguf(folder / "model.gguf", **options), torch.bfloat16, folder))


def test_what_transformers_reads_in_another_way_is_left_to_it(tmp_path: Path) -> None:
    if not is_read("lfm2"):
        pytest.skip("this gguf does not read it")
    sizes = {"attention_head_count_kv": [0, 2], "shortconv.l_cache": 3}
    path = write_architecture(tmp_path / "model.gguf", "lfm2", **sizes)
    header = files.GgufHeader.read(path)
    if weights.model_of(path, header, torch.float32, {}) is not None:
        pytest.skip("before transformers 5.19 it was one of many")
    kept = files._kept(path, torch.float32)
    files._write(path, header, torch.float32, kept, tmp_path / "own")
    files._by_transformers(path, torch.float32, {}).save_pretrained(tmp_path / "whole")
    found, expected = (load_file(tmp_path / name / WEIGHTS) for name in ("own", "whole"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# ---------------------------------------------------------------------- types of tensors
# Of others, gguf knows the size alone.
KINDS = ["F32", "F16", *(kind.name for kind in gguf.quants._type_traits)]


def stored(path: Path, kind: Any, shape: tuple[int, ...], place: int = 0) -> files.StoredTensor:
    """A tensor that alone makes a file, behind so many bytes."""
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    data = values if kind.name == "F32" else quantised(values, kind)
    path.write_bytes(bytes(place) + data.tobytes())
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return files.StoredTensor(shape, int(kind), block, size, place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_law_slices_are_what_gguf_makes_of_the_whole(
    tmp_path: Path, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_AT_ONCE", 1100)  # four blocks of 256; the last slice has two
    monkeypatch.setattr(weights, "_ALONE", 300)
    of = gguf.GGMLQuantizationType[kind]
    tensor = stored(tmp_path / "tensor", of, (3, 5, 512), place=36)
    raw = np.fromfile(tmp_path / "tensor", np.uint8, offset=36).reshape(15, -1)
    expected = torch.from_numpy(gguf.dequantize(raw, of)).reshape(3, 5, 512).to(dtype)
    found = weights.dequantised(tmp_path / "tensor", tensor, dtype)
    assert found.dtype == dtype
    assert found.isfinite().all()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16"])
def test_law_a_file_of_another_type(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, "llama", kind=kind, embedding_length=256, rope_dimension_count=64)
    kinds = {tensor.kind for tensor in files.GgufHeader.read(path).tensors.values()}
    assert int(gguf.GGMLQuantizationType[kind]) in kinds
    check_same(*saved(path, torch.bfloat16, tmp_path))


def test_a_tensor_is_never_float32_as_a_whole(tmp_path: Path) -> None:
    tensor = stored(tmp_path / "tensor", gguf.GGMLQuantizationType.Q8_0, (2048, 4096))
    tracemalloc.start()  # counts what numpy takes, not the tensor of the result
    weights.dequantised(tmp_path / "tensor", tensor, torch.bfloat16)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < tensor.elements * 4 / 2


# ---------------------------------------------------------------------- metadata
def test_the_vocabulary_is_not_read_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = [], gguf.GGUFReader.__init__

    def counted(reader: Any, path: str) -> None:
        real(reader, path)
        read.append(sum(len(one.data) for one in reader.fields.values()))

    path = write_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    assert weights.model_of(path, files.GgufHeader.read(path), torch.float32, {}) is not None
    assert read
    assert max(read) < len(TOKENS), "as many values as there are tokens"


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a checkpoint"])
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gpt2", "falcon"])
def test_law_a_tokenizer_is_the_one_of_transformers(
    tmp_path: Path, case: str, beside: bool
) -> None:
    path = written(tmp_path, case)
    if beside:
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 77}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    whole = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    own = files._gguf_tokenizer(path, files.GgufHeader.read(path), {})
    assert type(own) is type(whole)
    for name, tokenizer in {"own": own, "whole": whole}.items():
        tokenizer.save_pretrained(tmp_path / name)
    for expected in (tmp_path / "whole").iterdir():
        assert (tmp_path / "own" / expected.name).read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(
    "tensors",
    [[("a", (2, 48), 8)], [("a", (4,), 0), ("a", (4,), 0)]],
    ids=["half a block", "two of one name"],
)
def test_tensors_that_no_reader_takes_are_refused(tmp_path: Path, tensors: Any) -> None:
    path = tmp_path / "odd.gguf"
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0)]
    for name, shape, kind in tensors:
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        parts += [struct.pack("<Q", len(name)), name.encode(), axes, struct.pack("<IQ", kind, 0)]
    path.write_bytes(b"".join(parts) + bytes(1000))
    with pytest.raises(InvalidInputError, match="no whole GGUF file"):
        files.GgufHeader.read(path)
