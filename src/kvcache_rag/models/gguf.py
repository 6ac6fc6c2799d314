"""GGUF files: what is in one, its weights dequantised, and the result kept for the next time.

transformers reads such a file tensor by tensor, which takes long; so what it makes of one is kept
as an ordinary checkpoint in the user's cache folder, named by the digest of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import struct
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash
from filelock import FileLock

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.models.compiled import multiplies_bfloat16

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LOG = logging.getLogger(__name__)

SUFFIX: Final = ".gguf"

KEPT_BYTES: Final = 2_000_000_000
"""Limit of all kept checkpoints; the least recently used go first, a larger one is not kept."""

# What a writer that was killed leaves behind is cleared away after a day.
_LEFTOVER_SECONDS = 86400

# Seconds for which another process may dequantise the same file before this one does it, too.
_PATIENCE = 900.0

_SOURCE, _WEIGHTS, _FILES = "source.json", "model.safetensors", "files.json"

# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: formats of metadata by their number.
_PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_UNQUANTISED = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file holds.

    Attributes:
        elements: Weights in all.
        dtype: What its weights are loaded in when nobody says: their own, or `quantised_dtype`.
        nbytes: Of the file, as its header has it.
    """

    elements: int
    dtype: torch.dtype
    nbytes: int

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Read the header of a file, and see that the file is as long as it says.

        Raises:
            InvalidInputError: If it is no GGUF file, or a part of one.
            MissingExtraError: If the package `gguf` is not installed.
        """
        sizes = _block_sizes()
        try:
            with path.open("rb") as file:
                header = _parsed(_Fields(file), sizes)
        except (struct.error, KeyError, EOFError, OverflowError) as error:
            raise InvalidInputError(
                f"{path} is no whole GGUF file: its header ends early or cannot be read; "
                "download it again"
            ) from error
        except OSError as error:
            raise InvalidInputError(f"{path} cannot be read ({error.strerror})") from error
        found = path.stat().st_size
        if found < header.nbytes:
            raise InvalidInputError(
                f"{path} was cut: {found} of {header.nbytes} bytes are there; download it again"
            )
        return header

    def memory(self, dtype: torch.dtype) -> int:
        """Bytes of its weights in memory, dequantised to `dtype`."""
        return self.elements * dtype.itemsize


class _Fields:
    """Reads a header field by field."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def plain(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self._file.read(struct.calcsize(f"<{form}")))
        return value

    def text(self) -> bytes:
        length = self.plain("Q")
        found: bytes = self._file.read(length)
        if len(found) < length:
            raise EOFError
        return found

    def value(self, kind: int) -> Any:
        """A value of metadata; of an array nothing, as its items are only passed over."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.plain(_PLAIN[kind])
        inner, length = self.plain("I"), self.plain("Q")
        if inner in _PLAIN:
            self._file.seek(length * struct.calcsize(f"<{_PLAIN[inner]}"), os.SEEK_CUR)
            return None
        for _ in range(length):
            self.value(inner)
        return None

    @property
    def place(self) -> int:
        place: int = self._file.tell()
        return place


def _parsed(fields: _Fields, sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    if fields.plain("4s") != b"GGUF" or fields.plain("I") not in (2, 3):
        raise KeyError("magic")
    tensors, metadata = fields.plain("Q"), fields.plain("Q")
    alignment = 32
    for _ in range(metadata):
        name = fields.text()
        value = fields.value(fields.plain("I"))
        if name == b"general.alignment":
            alignment = int(value)
    elements, end = 0, 0
    by_type: dict[int, int] = {}
    for _ in range(tensors):
        fields.text()
        count = 1
        for _ in range(fields.plain("I")):
            count *= fields.plain("Q")
        kind, offset = fields.plain("I"), fields.plain("Q")
        block, size = sizes[kind]
        elements += count
        end = max(end, offset + count // block * size)
        by_type[kind] = by_type.get(kind, 0) + count
    start = -(-fields.place // alignment) * alignment
    dtype = quantised_dtype()
    if by_type and by_type.keys() <= _UNQUANTISED.keys():
        dtype = _UNQUANTISED[max(by_type, key=lambda kind: by_type[kind])]
    return GgufHeader(elements, dtype, start + end)


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
    target = header.dtype if dtype == "auto" else _torch_dtype(dtype)
    digest = file_digest(path)
    for _ in range(2):
        kept = _kept(digest, target)
        if kept is not None:
            loaded = _load_kept(kept, target, options, own_tokenizer=own_tokenizer)
            if loaded is not None:
                model, tokenizer = loaded
                model.config._name_or_path = str(path)
                if own_tokenizer and tokenizer is None:
                    tokenizer = _gguf_tokenizer(path, {})  # says why there is none
                return model, tokenizer
        if not _convert(path, header, digest, target):
            break
    model = _dequantised(path, target, options)
    return model, _gguf_tokenizer(path, {}) if own_tokenizer else None


def gguf_tokenizer(path: Path, options: Mapping[str, Any]) -> Any:
    """The tokenizer of a GGUF file: of its kept checkpoint if there is one, which is sooner."""
    header = GgufHeader.read(path)
    kept = _kept(file_digest(path), header.dtype)
    if kept is not None and (kept / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        with contextlib.suppress(OSError, ValueError):
            return AutoTokenizer.from_pretrained(str(kept), **options)
    return _gguf_tokenizer(path, options)


def _gguf_tokenizer(path: Path, options: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, **options)


def _torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise InvalidInputError(
            f"there is no dtype {dtype!r}; name one such as float32 or bfloat16"
        )
    return found


def _dequantised(path: Path, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    """The model as transformers makes it, without what says that it was quantised once."""
    from transformers import AutoModelForCausalLM

    try:
        from transformers import GgufConfig
    except ImportError:  # before transformers could keep weights packed, it never did
        unpacked = {}
    else:
        unpacked = {"quantization_config": GgufConfig(dequantize=True)}
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=dtype, **{**unpacked, **options}
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.config._name_or_path = str(path)
    return model


def _convert(path: Path, header: GgufHeader, digest: str, dtype: torch.dtype) -> bool:
    """Dequantise a file and keep the result; False if that cannot be."""
    size = header.memory(dtype)
    _LOG.warning(
        "%s: its %s weights are dequantised to %s: %s in memory, and up to %s while that is done",
        path.name,
        f"{header.elements:,}",
        str(dtype).removeprefix("torch."),
        _size(size),
        _size(size + 4 * header.elements),  # transformers makes float32 of them first
    )
    if size > KEPT_BYTES:
        return False
    folder, name = cache_folder(), _kept_name(digest, dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        # Who comes second waits: dequantising twice at once takes twice the memory, too.
        with FileLock(folder / f".{name}.lock", timeout=_PATIENCE, mode=0o600):
            if _kept(digest, dtype) is None:
                _evict(KEPT_BYTES - size)
                _write(path, digest, dtype, folder / name)
    except OSError as error:
        _LOG.warning("the dequantised weights of %s cannot be kept: %s", path.name, error)
        return False
    return True


def _write(path: Path, digest: str, dtype: torch.dtype, target: Path) -> None:
    """Dequantise a file into a folder, which appears as a whole."""
    partial = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))  # 0700
    try:
        model = _dequantised(path, dtype, {})
        model.save_pretrained(str(partial))
        # Without one of its own, a tokenizer has to be given.
        with contextlib.suppress(Exception):
            _gguf_tokenizer(path, {}).save_pretrained(str(partial))
        source = {
            "file": path.name,
            "sha256": digest,
            "dtype": str(dtype).removeprefix("torch."),
            "weights": _fast_digest(partial / _WEIGHTS),
        }
        (partial / _SOURCE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)  # a part of one, or it would have been loaded
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _load_kept(
    folder: Path, dtype: torch.dtype, options: Mapping[str, Any], *, own_tokenizer: bool
) -> tuple[Any, Any] | None:
    """Model and tokenizer of a kept checkpoint; None for one that is damaged."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        source = json.loads((folder / _SOURCE).read_text(encoding="utf-8"))
        if source["weights"] != _fast_digest(folder / _WEIGHTS):
            raise ValueError("its weights were changed")
        has_tokenizer = own_tokenizer and (folder / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(str(folder)) if has_tokenizer else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("the kept checkpoint %s is damaged and made anew: %s", folder.name, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **options)
    except OSError:  # another process made room just now
        if (folder / _SOURCE).is_file():
            raise
        return None
    with contextlib.suppress(OSError):
        os.utime(folder)
    return model, tokenizer


# ---------------------------------------------------------------------- what is kept
@dataclass(frozen=True)
class KeptCheckpoint:
    """A dequantised checkpoint in the cache folder.

    Attributes:
        folder: Where it is.
        file: Name of the GGUF file that it was made from.
        sha256: Digest of that file.
        dtype: Of its weights.
        nbytes: On disk.
        used: When it was last loaded, in seconds since the epoch.
    """

    folder: Path
    file: str
    sha256: str
    dtype: str
    nbytes: int
    used: float


def cache_folder() -> Path:
    """Where dequantised checkpoints are kept: below the user's folder for caches.

    `$XDG_CACHE_HOME` where it is set; else as the platform has it.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):
        base = Path(chosen)
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base / "kvcache-rag" / "models"


def kept_checkpoints() -> list[KeptCheckpoint]:
    """All of them, the least recently used first."""
    found = []
    for folder in _folders():
        try:
            source = json.loads((folder / _SOURCE).read_text(encoding="utf-8"))
            nbytes = sum(file.stat().st_size for file in folder.iterdir())
            used = folder.stat().st_mtime
            named = {name: str(source[name]) for name in ("file", "sha256", "dtype")}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.append(KeptCheckpoint(folder, nbytes=nbytes, used=used, **named))
    return sorted(found, key=lambda kept: kept.used)


def clear_kept() -> int:
    """Delete all that is kept; how many checkpoints that were.

    Raises:
        OSError: If one cannot be deleted.
    """
    folders = [*_folders()]
    for folder in folders:
        shutil.rmtree(folder)
    for file in (cache_folder() / _FILES, *cache_folder().glob(".*.lock")):
        file.unlink(missing_ok=True)
    return len(folders)


def _evict(room: int) -> None:
    """Delete the least recently used until `room` bytes are left at most, and old leftovers."""
    kept = kept_checkpoints()
    total = sum(member.nbytes for member in kept)
    for member in kept:
        if total <= room:
            break
        shutil.rmtree(member.folder, ignore_errors=True)
        total -= member.nbytes
    known = {member.folder for member in kept}
    for folder in _folders():
        if folder not in known and folder.stat().st_mtime < time.time() - _LEFTOVER_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _folders() -> Iterator[Path]:
    try:
        for path in cache_folder().iterdir():
            if path.is_dir() and not path.is_symlink():
                yield path
    except OSError:
        return


def _kept_name(digest: str, dtype: torch.dtype) -> str:
    return f"{digest[:32]}-{str(dtype).removeprefix('torch.')}"


def _kept(digest: str, dtype: torch.dtype) -> Path | None:
    folder = cache_folder() / _kept_name(digest, dtype)
    return folder if (folder / _SOURCE).is_file() else None


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


# ---------------------------------------------------------------------- digests
@dataclass(frozen=True)
class _Stamp:
    """What of a file changes when it is written."""

    size: int
    mtime: int
    ctime: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read once and then again only if it was changed."""
    name, stamp = str(path.absolute()), asdict(_Stamp.of(path))
    index = cache_folder() / _FILES
    try:
        known = json.loads(index.read_text(encoding="utf-8"))
        if known[name]["stamp"] == stamp:
            return str(known[name]["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    state = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            state.update(part)
    known = {**known, name: {"stamp": stamp, "sha256": state.hexdigest()}}
    with contextlib.suppress(OSError):
        index.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, partial = tempfile.mkstemp(prefix=".", dir=index.parent)  # 0600
        with open(descriptor, "w", encoding="utf-8") as written:
            json.dump(known, written)
        os.replace(partial, index)
    return state.hexdigest()


def _fast_digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            state.update(part)
    return state.hexdigest()
