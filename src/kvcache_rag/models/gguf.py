"""GGUF files: their contents, their weights dequantised, and the result kept for next time.

Dequantising takes seconds; so the result is kept as an ordinary checkpoint in the user's cache
folder, named by the digest of the file.
"""

from __future__ import annotations

import json
import logging
import math
import os
import struct
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.models.gguf_weights import Description, ensure_whole, model_of
from kvcache_rag.models.kept import file_digest, kept_folder, kept_or_made, read_kept
from kvcache_rag.models.processors import multiplies_bfloat16

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_LOG = logging.getLogger(__name__)

# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: formats of metadata by their number.
_PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Beyond what any file has: axes of a tensor, arrays within arrays, bytes of a header.
_AXES, _ARRAYS, _HEADER = 8, 4, 1 << 28
_PIECE = 1 << 20  # bytes of a header that are read at once
# What transformers reads of a folder when it makes a tokenizer of a file in it.
_BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("config.json", "chat_template.jinja"),
)
_FLOAT32, _FACTORS = 0, 1 << 12  # a type; most numbers of a tensor of factors
_UNQUANTISED = {_FLOAT32: torch.float32, 1: torch.float16, 30: torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """How a tensor lies in a file.

    Attributes:
        shape: In numbers, the axis that moves fastest last.
        kind: ggml's number of its type.
        block: Numbers that are quantised together; 1 for floats.
        block_bytes: Bytes of such a block.
        place: Of its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    block: int
    block_bytes: int
    place: int

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Place in the file behind it."""
        return self.place + self.elements // self.block * self.block_bytes


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file holds.

    Attributes:
        architecture: llama.cpp's name of it; "" if the file has none.
        tensors: By their names, in the order of the file.
        metadata: First byte of an entry in the file and the one behind it, by the entry's name.
        start: Where tensors begin.
    """

    architecture: str
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, tuple[int, int]]
    start: int

    @property
    def elements(self) -> int:
        """Weights in all."""
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Of the file, as its header has it."""
        return max((tensor.end for tensor in self.tensors.values()), default=self.start)

    @property
    def dtype(self) -> torch.dtype:
        """What its weights are loaded in when nobody says: their own, or `quantised_dtype`."""
        by_kind: dict[int, int] = {}
        for tensor in self.tensors.values():
            by_kind[tensor.kind] = by_kind.get(tensor.kind, 0) + tensor.elements
        if by_kind and by_kind.keys() <= _UNQUANTISED.keys():
            return _UNQUANTISED[max(by_kind, key=lambda kind: by_kind[kind])]
        return quantised_dtype()

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Read the header of a file, and see that the file is as long as it says.

        Raises:
            InvalidInputError: If it is no GGUF file, or a part of one.
            MissingExtraError: If the package `gguf` is not installed.
        """
        try:
            found = path.stat()
            told = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
            header = _header(path, *told)
        except (struct.error, KeyError, TypeError, ValueError, EOFError, OverflowError) as error:
            raise InvalidInputError(
                f"{path} is no whole GGUF file: its header ends early or cannot be read; "
                "download it again"
            ) from error
        except OSError as error:
            raise InvalidInputError(f"{path} cannot be read ({error.strerror})") from error
        if found.st_size < header.nbytes:
            raise InvalidInputError(
                f"{path} was cut: {found.st_size} of {header.nbytes} bytes are there; "
                "download it again"
            )
        return header

    def rope_factors(self, path: Path) -> dict[str, torch.Tensor]:
        """What divides rotary frequencies, `(dim / 2,)` float32 each, by the tensors' names."""
        found = {}
        with path.open("rb") as file:
            for name, tensor in self.tensors.items():
                count = tensor.elements
                if name.startswith("rope_") and tensor.kind == _FLOAT32 and count <= _FACTORS:
                    file.seek(tensor.place)
                    values = struct.unpack(f"<{count}f", file.read(4 * count))
                    found[name.removesuffix(".weight")] = torch.tensor(values)
        return found

    def vectors(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of one axis that are not quantised, such as the weights of norms, by name."""
        with path.open("rb") as file:
            for name, tensor in self.tensors.items():
                if len(tensor.shape) == 1 and tensor.kind in _UNQUANTISED:
                    file.seek(tensor.place)
                    content = bytearray(file.read(tensor.end - tensor.place))
                    yield name, torch.frombuffer(content, dtype=_UNQUANTISED[tensor.kind])

    def memory(self, dtype: torch.dtype) -> int:
        """Bytes of its weights in memory, dequantised to `dtype`."""
        return self.elements * dtype.itemsize


class _Fields:
    """Reads a header field by field; whatever is in it, in a time that its length bounds.

    Raises:
        Exception: Of several kinds, for what is no header.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._most = min(os.fstat(file.fileno()).st_size, _HEADER)

    def plain(self, form: str) -> Any:
        if self.place > self._most:
            raise EOFError
        (value,) = struct.unpack(f"<{form}", self._file.read(struct.calcsize(f"<{form}")))
        return value

    def text(self) -> bytes:
        length = self.plain("Q")
        if length > self._most:
            raise EOFError
        found: bytes = self._file.read(length)
        if len(found) < length:
            raise EOFError
        return found

    def value(self, kind: int, arrays: int = 0) -> Any:
        """A value of metadata; of an array nothing, as its items are only passed over."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.plain(_PLAIN[kind])
        if arrays == _ARRAYS:
            raise ValueError("arrays within arrays")
        inner, length = self.plain("I"), self.plain("Q")
        if inner in _PLAIN:
            self._file.seek(length * struct.calcsize(f"<{_PLAIN[inner]}"), os.SEEK_CUR)
            return None
        if inner == _STRING:
            self._pass_over(length)
        else:
            for _ in range(length):
                self.value(inner, arrays + 1)
        return None

    def _pass_over(self, texts: int) -> None:
        """A vocabulary has some 300,000 texts: nothing but their lengths is looked at."""
        first, part, at = self.place, b"", 0
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(texts):
            if at + 8 > len(part):
                first, at = self._moved(first + at), 0
                part = self._file.read(_PIECE)
            at += 8 + length_at(part, at)[0]
        self._moved(first + at)

    def _moved(self, place: int) -> int:
        if place > self._most:
            raise EOFError
        self._file.seek(place)
        return place

    @property
    def place(self) -> int:
        place: int = self._file.tell()
        return place


@lru_cache(maxsize=8)
def _header(path: Path, *_: int) -> GgufHeader:
    """The header of a file that stays as it is: loading asks for it several times."""
    sizes = _block_sizes()
    with path.open("rb") as file:
        return _parsed(_Fields(file), sizes)


def _parsed(fields: _Fields, sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    if fields.plain("4s") != b"GGUF" or fields.plain("I") not in (2, 3):
        raise KeyError("magic")
    tensors, entries = fields.plain("Q"), fields.plain("Q")
    architecture, alignment = "", 32
    metadata: dict[str, tuple[int, int]] = {}
    for _ in range(entries):
        place = fields.place
        name = fields.text().decode()
        value = fields.value(fields.plain("I"))
        metadata[name] = place, fields.place
        if name == "general.architecture":
            architecture = str(value, "utf-8")
        elif name == "general.alignment":
            alignment = int(value)
            if alignment < 1:
                raise ValueError("alignment")
    found = dict(_tensor(fields, sizes) for _ in range(tensors))
    if len(metadata) < entries or len(found) < tensors:
        raise ValueError("two of one name")
    start = -(-fields.place // alignment) * alignment
    placed = {name: replace(one, place=start + one.place) for name, one in found.items()}
    return GgufHeader(architecture, placed, metadata, start)


def _tensor(fields: _Fields, sizes: Mapping[int, tuple[int, int]]) -> tuple[str, StoredTensor]:
    """Name of a tensor, and how it lies behind where tensors begin."""
    name = fields.text().decode()
    axes = fields.plain("I")
    if axes > _AXES:
        raise ValueError("axes")
    shape = tuple(fields.plain("Q") for _ in range(axes))[::-1]
    kind, offset = fields.plain("I"), fields.plain("Q")
    block, block_bytes = sizes[kind]
    if (shape[-1] if shape else 1) % block:
        raise ValueError("rows are no whole blocks")
    return name, StoredTensor(shape, kind, block, block_bytes, offset)


def quantised_dtype() -> torch.dtype:
    """What quantised weights become when nobody says: bfloat16, where this machine multiplies it.

    Else float32: a CPU without such instructions takes five times as long in bfloat16.
    """
    is_fast = torch.cuda.is_available() or multiplies_bfloat16()
    return torch.bfloat16 if is_fast else torch.float32


def _block_sizes() -> dict[int, tuple[int, int]]:
    """Elements and bytes of a block, by type of tensor."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise MissingExtraError("gguf", "gguf") from error
    return {int(kind): (int(block), int(size)) for kind, (block, size) in GGML_QUANT_SIZES.items()}


# ---------------------------------------------------------------------- loading
def load_gguf(
    path: Path, *, dtype: torch.dtype | str, options: Mapping[str, Any], own_tokenizer: bool
) -> tuple[Any, Any]:
    """The model of a GGUF file, dequantised, and its tokenizer.

    Args:
        path: The file.
        dtype: "auto" for what `GgufHeader.dtype` says.
        options: Further arguments of transformers' `from_pretrained`.
        own_tokenizer: Whether the file's own tokenizer is wanted; else None is given for it.
    """
    header = GgufHeader.read(path)
    target = header.dtype if dtype == "auto" else torch_dtype(dtype)
    kept = _kept(path, target)
    model = kept_or_made(
        kept,
        lambda folder: kept_model(folder, target, options),
        partial(_write, path, header, target, kept),
        header.memory(target),
    )
    if model is None:
        model = _dequantised(path, header, target, options)
    model.config._name_or_path = str(path)
    return model, gguf_tokenizer(path, {}) if own_tokenizer else None


def kept_model(folder: Path, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    """The model of a checkpoint that was kept."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **options)


def gguf_tokenizer(path: Path, options: Mapping[str, Any]) -> Any:
    """The tokenizer of a GGUF file, kept for the next time: making one takes seconds."""
    header = GgufHeader.read(path)
    # transformers heeds what lies beside a file.
    beside = [place for name in _BESIDE if (place := path.parent / name).is_file()]
    told = (f"{place.name} {file_digest(place)}" for place in beside)
    folder = kept_folder([file_digest(path), *told], "tokenizer")
    read, write = partial(_load_tokenizer, options=options), partial(_keep_tokenizer, path, header)
    found = read_kept(folder, read) if options else kept_or_made(folder, read, write)
    return _gguf_tokenizer(path, header, options) if found is None else found


def _load_tokenizer(folder: Path, options: Mapping[str, Any]) -> Any:
    import transformers

    said = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    # Of that class it is whole; to find out any other's, much is loaded.
    kind: Any = transformers.PreTrainedTokenizerFast
    if said.get("tokenizer_class") != kind.__name__:
        kind = transformers.AutoTokenizer
    return kind.from_pretrained(str(folder), **options)


def _keep_tokenizer(path: Path, header: GgufHeader, folder: Path) -> None:
    _gguf_tokenizer(path, header, {}).save_pretrained(str(folder))


def _gguf_tokenizer(path: Path, header: GgufHeader, options: Mapping[str, Any]) -> Any:
    from transformers import TOKENIZER_MAPPING, AutoTokenizer

    kind: Any = None
    # transformers finds the class by the configuration, unless this file says it.
    if not (path.parent / "tokenizer_config.json").exists():
        description = Description.read(path, header)
        if description is not None:
            kind = TOKENIZER_MAPPING.get(type(description.config()[0]), None)
    if kind is None or kind.__name__ == "MistralCommonBackend":  # decides by more
        kind = AutoTokenizer
    return kind.from_pretrained(str(path.parent), gguf_file=path.name, **options)


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        InvalidInputError: If there is none.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise InvalidInputError(
            f"there is no dtype {dtype!r}; name one such as float32 or bfloat16"
        )
    return found


def _dequantised(
    path: Path, header: GgufHeader, dtype: torch.dtype, options: Mapping[str, Any]
) -> Any:
    """The model, without what says that it was quantised once."""
    size = header.memory(dtype)
    largest = max((tensor.elements for tensor in header.tensors.values()), default=0)
    _LOG.warning(
        "%s: its %s weights are dequantised to %s: %s in memory, and up to %s while that is done",
        path.name,
        f"{header.elements:,}",
        str(dtype).removeprefix("torch."),
        _size(size),
        _size(size + 4 * largest),  # one tensor at a time is float32
    )
    model = model_of(path, header, dtype, options)
    return _by_transformers(path, dtype, options) if model is None else model


def _by_transformers(path: Path, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        from transformers import GgufConfig
    except ImportError:  # before transformers could keep weights packed, it never did
        unpacked = {}
    else:
        unpacked = {"quantization_config": GgufConfig(dequantize=True)}
    told = {"output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=dtype, **{**unpacked, **options, **told}
    )
    model, found = loaded
    ensure_whole(path, found)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    return model


def _write(path: Path, header: GgufHeader, dtype: torch.dtype, kept: Path, folder: Path) -> None:
    """Dequantise a file into a folder that will be `kept`.

    Raises:
        OSError: If it became another file meanwhile.
    """
    _dequantised(path, header, dtype, {}).save_pretrained(str(folder))
    if _kept(path, dtype) != kept:
        raise OSError(f"{path} was changed meanwhile")


def _kept(path: Path, dtype: torch.dtype) -> Path:
    """Where what a file becomes is kept, by the content of the file."""
    form = str(dtype).removeprefix("torch.")
    return kept_folder([file_digest(path)], form)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
