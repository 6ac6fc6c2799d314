"""All calls of llama-cpp-python; no other module calls it.

A context is not thread-safe; callers hold the model's lock.
"""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.models.language import StoppedError
from kvcache_rag_llamacpp.thread import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Logits: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

# ggml's numbers of types.
CACHE_TYPES: Final = {"float32": 0, "float16": 1, "bfloat16": 30}

# Tokens of one call at most.
_BATCH = 2048
# Of them those that are computed together.  A CPU is no faster with more, and their attention takes
# memory: tokens x cells x heads x 4 bytes.
_MICRO_BATCH, _MICRO_BATCH_ON_GPU = 128, 512
# Cells are asked for in such steps, so that a context serves the next question, too.
CELL_STEP: Final = 256
# Sequences of a context that nobody said he needs more of.
_SEQUENCES = 8
_ABORTED = 2
# Kinds of RoPE: none; neighbours; halves.
_NONE, _NEIGHBOURS, _HALVES = -1, 0, 2


class LlamaCppError(RuntimeError):
    """What llama.cpp was asked for, and could not do."""


def library() -> Any:
    """The functions of llama-cpp-python.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        from llama_cpp import llama_cpp
    except ImportError as error:
        raise MissingExtraError("llama-cpp-python", "llama-cpp") from error
    _silence(llama_cpp)
    return llama_cpp


_QUIET: list[Any] = []


def _silence(lib: Any) -> None:
    """Pass on what llama.cpp says of errors alone, and that to the log."""
    if _QUIET:
        return
    import logging

    log = logging.getLogger(__name__)

    @lib.llama_log_callback  # type: ignore[untyped-decorator]
    def say(level: int, text: bytes, _data: Any) -> None:
        if level >= _LOG_WARNING:
            log.debug("%s", text.decode(errors="replace").rstrip())

    _QUIET.append(say)  # ctypes keeps no reference
    lib.llama_log_set(say, None)
    lib.llama_backend_init()


_LOG_WARNING = 3


# Who compiled a library, as it says itself: clang, whose OpenMP is libomp, or a gcc.
_CLANG: Final = re.compile(rb"clang version |libomp\.so")
_GCC: Final = re.compile(rb"GCC: \([^)]*\) (\d+)")
_GCC_FOR_AMX: Final = 13


def uses_extra_buffers(lib: Any) -> bool:
    """Whether weights may be packed for the CPU's own instructions.

    For AMX only where it is known who compiled it: by gcc 12, llama.cpp's use of it ends the
    process at its first product.
    """
    return uses_amx(lib) or not _has_amx(lib)


def uses_amx(lib: Any) -> bool:
    """Whether weights are packed for AMX."""
    if not _has_amx(lib):
        return False
    folder = Path(lib.__file__).parent / "lib"
    return any(is_compiled_for_amx(file.read_bytes()) for file in folder.glob("libggml-cpu*.so"))


def _has_amx(lib: Any) -> bool:
    return b"AMX_INT8 = 1" in lib.llama_print_system_info()


def is_compiled_for_amx(library: bytes) -> bool:
    """Whether a library was compiled by what makes code for AMX that runs."""
    versions = [int(version) for version in _GCC.findall(library)]
    return bool(_CLANG.search(library)) or min(versions, default=0) >= _GCC_FOR_AMX


def installed_version() -> str:
    """What names the llama.cpp that is installed: the binding's version, and its own."""
    said = getattr(library(), "llama_version", lambda: b"")() or b""
    return f"{version('llama-cpp-python')} ({said.decode(errors='replace')})"


@dataclass(frozen=True)
class ContextOptions:
    """How a context is made; part of what names its chunks.

    Attributes:
        cache_type: Of `CACHE_TYPES`: the dtype of keys and values.
        flash: Whether attention is flash attention; decides how values lie in a state.
        least: Fewest cells, where frequencies depend on their number (longrope).
        most: Most cells, likewise; 0 for any number.
    """

    cache_type: str = "float16"
    flash: bool = False
    least: int = 0
    most: int = 0


def _here(function: Callable[..., int], *arguments: Any) -> int:
    return function(*arguments)


class LlamaCpp:
    """A model that llama.cpp has loaded, and its one context, which is made when it is needed.

    Attributes:
        path: Its file.
        options: How contexts are made.
        begun: How often the context was emptied or freed: what was in it is gone.
        is_settled: Whether an engine has said how contexts are made.
        together: Tokens of one call that are computed together at most.
        threads: Gives how many to compute with.
    """

    def __init__(
        self,
        path: Path,
        options: ContextOptions,
        *,
        gpu_layers: int,
        gpu: int | None = None,
        threads: Callable[[], int],
    ) -> None:
        """Load a GGUF file, mapped into memory unless its weights are copied.

        Args:
            path: The file.
            options: How contexts are made.
            gpu_layers: How many layers go to GPUs; -1 for all.
            gpu: Number of the only one that is used; None for all.
            threads: Gives how many to compute with.

        Raises:
            InvalidInputError: If llama.cpp cannot load it.
            MissingExtraError: If llama-cpp-python is not installed.
        """
        self.lib = library()
        self.path, self.options, self.threads = path, options, threads
        self.gpu_layers = gpu_layers
        parameters = self.lib.llama_model_default_params()
        parameters.n_gpu_layers = gpu_layers
        if gpu is not None:
            parameters.split_mode, parameters.main_gpu = self.lib.LLAMA_SPLIT_MODE_NONE, gpu
        parameters.use_extra_bufts = uses_extra_buffers(self.lib)
        has_tiles = uses_amx(self.lib)
        if has_tiles and not gpu_layers:  # packed weights are a copy, a mapped file stays beside it
            parameters.load_mode = self.lib.LLAMA_LOAD_MODE_NONE
        self.model = self.lib.llama_model_load_from_file(os.fsencode(path), parameters)
        if not self.model:
            raise InvalidInputError(
                f"llama.cpp {installed_version()} cannot load {path}: its architecture or types "
                'are unknown to it, or memory is short; try backend="transformers"'
            )
        self._called = OwnThread() if has_tiles else _here
        self._free_model = weakref.finalize(self, self.lib.llama_model_free, self.model)
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.vocabulary = int(self.lib.llama_vocab_n_tokens(self.vocab))
        self.context: Any = None
        self.is_settled = False
        self.begun = self.cells = self.sequences = self.together = 0
        self._free_context: Any = None
        self._adapter: Any = None
        self._acts = False
        self._abort: Any = None

    def adapt(self, path: Path, *, acts: bool = True) -> None:
        """Load an adapter for all contexts from now on.

        Args:
            path: Its file.
            acts: Whether it is in force until something else is said (`set_acting`).

        Raises:
            InvalidInputError: If llama.cpp cannot read it, or it does not fit.
        """
        self._adapter = self.lib.llama_adapter_lora_init(self.model, os.fsencode(path))
        if not self._adapter:  # freed with the model
            raise InvalidInputError(f"the adapter does not fit the model {self.path.name}")
        self._acts = acts
        self.close_context()

    @contextmanager
    def acting(self, *, acts: bool) -> Iterator[None]:
        """Let the adapter be in force, or out of it, and then as it was."""
        before = self._acts
        self.set_acting(acts=acts)
        try:
            yield
        finally:
            self.set_acting(acts=before)

    def set_acting(self, *, acts: bool) -> None:
        """Let the adapter be in force, or out of it."""
        if acts != self._acts and self._adapter:
            self._acts = acts
            if self.context:
                self._put_adapter(self.context)

    def _put_adapter(self, context: Any) -> None:
        lib, count = self.lib, int(self._acts)
        one = (lib.llama_adapter_lora_p_ctypes * 1)(self._adapter)
        if lib.llama_set_adapters_lora(context, one, count, (ctypes.c_float * 1)(1.0)):
            raise RuntimeError("llama.cpp could not put the adapter into a context")

    # ---------------------------------------------------------------- what the file says

    def metadata(self, key: str) -> str | None:
        """A value of the file's metadata as text; None without one."""
        room = ctypes.create_string_buffer(1 << 10)
        length = self.lib.llama_model_meta_val_str(self.model, key.encode(), room, len(room))
        return None if length < 0 else room.value.decode(errors="replace")

    def number(self, key: str) -> float | None:
        """A number of the metadata of this architecture; None without one."""
        text = self.metadata(f"{self.architecture}.{key}")
        try:
            return None if text is None else float(text)
        except ValueError:
            return None  # a list, one per layer

    @cached_property
    def architecture(self) -> str:
        """Its family, as llama.cpp calls it."""
        return self.metadata("general.architecture") or "unknown"

    @property
    def parameters(self) -> int:
        """How many weights it has."""
        return int(self.lib.llama_model_n_params(self.model))

    @property
    def trained_length(self) -> int:
        """Context window that it was made with."""
        return int(self.lib.llama_model_n_ctx_train(self.model))

    @property
    def layers(self) -> int:
        """How many it has."""
        return int(self.lib.llama_model_n_layer(self.model))

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries and of keys, in its first layer."""
        lib = self.lib
        return lib.llama_model_n_head(self.model), lib.llama_model_n_head_kv(self.model)

    @property
    def most_sequences(self) -> int:
        """How many a context can have."""
        return int(self.lib.llama_max_parallel_sequences())

    @property
    def rotates_halves(self) -> bool:
        """Whether column i of a head is rotated with i + width / 2, not with its neighbour."""
        return int(self.lib.llama_model_rope_type(self.model)) == _HALVES

    @property
    def window(self) -> int:
        """Sliding window of the layers that have one; 0 without any."""
        return int(self.lib.llama_model_n_swa(self.model))

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state instead of keys and values."""
        lib = self.lib
        return bool(
            lib.llama_model_is_recurrent(self.model) or lib.llama_model_is_hybrid(self.model)
        )

    @property
    def has_other_positions(self) -> bool:
        """Whether a token's position is several numbers (M-RoPE)."""
        known = (_NONE, _NEIGHBOURS, _HALVES)
        return int(self.lib.llama_model_rope_type(self.model)) not in known

    @property
    def can_generate(self) -> bool:
        """Whether it is a causal language model."""
        lib = self.lib
        return bool(
            lib.llama_model_has_decoder(self.model)
            and not lib.llama_model_has_encoder(self.model)
            and not lib.llama_model_is_diffusion(self.model)
        )

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        is_end = self.lib.llama_vocab_is_eog
        return tuple(token for token in range(self.vocabulary) if is_end(self.vocab, token))

    def piece(self, token: int) -> str:
        """A token as the file writes it."""
        text: bytes = self.lib.llama_vocab_get_text(self.vocab, token) or b""
        return text.decode(errors="replace")

    # ---------------------------------------------------------------- its context

    def ensure(self, cells: int, sequences: int = 0) -> None:
        """Have a context of at least so many cells and sequences; an older one is lost with it.

        Raises:
            InvalidInputError: If llama.cpp has no memory for it.
        """
        if self.context and self.cells >= cells and self.sequences >= sequences:
            return
        options = self.options
        cells = max(-(-cells // CELL_STEP) * CELL_STEP, options.least)
        cells = max(min(cells, options.most or cells), self.cells)
        sequences = max(sequences, self.sequences, _SEQUENCES)
        self.close_context()
        lib = self.lib
        parameters = lib.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch = cells, min(_BATCH, cells)
        together = _MICRO_BATCH_ON_GPU if self.gpu_layers else _MICRO_BATCH
        parameters.n_ubatch = self.together = min(together, cells)
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = self.threads()
        # Never "auto", which would decide how values lie in a state.
        parameters.flash_attn_type = int(options.flash)
        parameters.type_k = parameters.type_v = CACHE_TYPES[options.cache_type]
        parameters.kv_unified = True  # sequences share cells, and copying one copies no keys
        parameters.swa_full = True  # layers with a window drop nothing
        parameters.no_perf = True
        made = lib.llama_init_from_model(self.model, parameters)
        if not made:
            raise InvalidInputError(
                f"llama.cpp can make no context of {cells} tokens for {self.path.name}; give a "
                "smaller context_window, or fewer questions at once"
            )
        self.context, self.cells, self.sequences = made, cells, sequences
        if self._adapter:
            self._put_adapter(made)
        self._free_context = weakref.finalize(self, lib.llama_free, made)
        self._memory = lib.llama_get_memory(made)
        self._limit = int(lib.llama_n_batch(made))

    def close_context(self) -> None:
        """Free the context."""
        if self._free_context is not None:
            self._free_context()
        self.context, self._free_context, self.cells = None, None, 0
        self.begun += 1

    def stop_when(self, is_stopped: Callable[[], bool] | None) -> None:
        """End passes as soon as `is_stopped` says so; None for no more of that."""
        if not self.context:
            return
        kind = self.lib.ggml_abort_callback
        self._abort = kind() if is_stopped is None else kind(lambda _data: is_stopped())
        self.lib.llama_set_abort_callback(self.context, self._abort, None)

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[bool],
    ) -> Logits:
        """Compute tokens behind what their sequences hold.

        Args:
            tokens: Ids.
            positions: Of each; of a sequence that is not empty the next ones.
            sequences: The one of each.
            wanted: Of which logits are wanted.

        Returns:
            `(wanted, vocabulary)`, a copy.

        Raises:
            StoppedError: If it was stopped.
            LlamaCppError: If llama.cpp could not.
        """
        lib, rows = self.lib, []
        count = self.threads()
        lib.llama_set_n_threads(self.context, count, count)
        for first in range(0, len(tokens), self._limit):
            part = slice(first, first + self._limit)
            rows.append(self._decoded(tokens[part], positions[part], sequences[part], wanted[part]))
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _decoded(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[bool],
    ) -> Logits:
        lib, n = self.lib, len(tokens)
        ids = (lib.llama_seq_id * n)(*sequences)
        step = ctypes.sizeof(lib.llama_seq_id)
        pointer = ctypes.POINTER(lib.llama_seq_id)
        places = (pointer * n)(
            *(ctypes.cast(ctypes.addressof(ids) + index * step, pointer) for index in range(n))
        )
        batch = lib.llama_batch(
            n,
            (lib.llama_token * n)(*tokens),
            None,
            (lib.llama_pos * n)(*positions),
            (ctypes.c_int32 * n)(*[1] * n),
            places,
            (ctypes.c_int8 * n)(*map(int, wanted)),
        )
        code = self._called(lib.llama_decode, self.context, batch)
        if code == _ABORTED:
            raise StoppedError
        if code:
            raise LlamaCppError(f"llama.cpp could not compute {n} tokens (code {code})")
        found = [
            np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, index), (self.vocabulary,))
            for index, is_wanted in enumerate(wanted)
            if is_wanted
        ]
        return np.stack(found) if found else np.empty((0, self.vocabulary), np.float32)

    # ---------------------------------------------------------------- its sequences

    def state(self, sequence: int) -> bytearray:
        """The cells of a sequence as bytes."""
        lib = self.lib
        size = lib.llama_state_seq_get_size(self.context, sequence)
        state = bytearray(size)
        room = (ctypes.c_uint8 * size).from_buffer(state)
        if lib.llama_state_seq_get_data(self.context, room, size, sequence) != size:
            raise LlamaCppError("llama.cpp could not write the state of a sequence")
        return state

    def set_state(self, sequence: int, state: bytearray) -> None:
        """Fill a sequence, which is emptied first, with cells that we wrote as bytes.

        Raises:
            LlamaCppError: If llama.cpp does not take them.
        """
        lib, size = self.lib, len(state)
        room = (ctypes.c_uint8 * size).from_buffer(state)
        if lib.llama_state_seq_set_data(self.context, room, size, sequence) != size:
            raise LlamaCppError("llama.cpp could not read the state of a sequence")

    def copy(self, source: int, target: int, start: int = -1, stop: int = -1) -> None:
        """Let a sequence have the cells of another one, too, at positions `start..stop`."""
        self.lib.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def remove(self, sequence: int, start: int = -1, stop: int = -1) -> None:
        """Take cells from a sequence, all or those at positions `start..stop`."""
        if not self.lib.llama_memory_seq_rm(self._memory, sequence, start, stop):
            raise LlamaCppError("llama.cpp could not drop a part of a sequence")

    def empty(self, *, wipe: bool = False) -> None:
        """Empty all sequences, so that cells are taken in the same order each time.

        Args:
            wipe: Whether to overwrite what lies in them.
        """
        if self.context:
            self.lib.llama_memory_clear(self._memory, wipe)
            self.begun += 1
