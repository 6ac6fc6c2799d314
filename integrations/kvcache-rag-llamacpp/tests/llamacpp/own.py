"""llama.cpp's own decoding, by its C functions alone: what the laws are measured against.

Nothing here is the package's but how weights are packed: a model and a context of its own,
`llama_decode`, sequences that are copied and dropped.  No state is written or read, no key is
turned, and a chunk is computed where it stands.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from llama_cpp import llama_cpp as lib

from kvcache_rag_llamacpp.binding import uses_extra_buffers

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from torch import Tensor

TYPES: Final = {"float32": 0, "float16": 1, "bfloat16": 30}
# Sequences: where a chunk is computed, and the prompt.
_WORK, _ASKED = range(2)

_SILENT: Final = lib.llama_log_callback(lambda level, text, data: None)


class Own:
    """A file in llama.cpp, and a context that nobody else uses."""

    def __init__(
        self,
        path: Path | str,
        *,
        dtype: str = "float32",
        flash: bool = False,
        cells: int = 2048,
        micro_batch: int = 128,
    ) -> None:
        lib.llama_log_set(_SILENT, None)
        lib.llama_backend_init()
        given = lib.llama_model_default_params()
        given.n_gpu_layers = 0
        given.use_extra_bufts = uses_extra_buffers(lib)
        self._model = lib.llama_model_load_from_file(os.fsencode(path), given)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        wanted = lib.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = cells, cells, micro_batch
        wanted.n_seq_max, wanted.n_threads, wanted.n_threads_batch = 2, 1, 1
        wanted.flash_attn_type, wanted.kv_unified, wanted.swa_full = int(flash), True, True
        wanted.type_k = wanted.type_v = TYPES[dtype]
        self._context = lib.llama_init_from_model(self._model, wanted)
        self._memory = lib.llama_get_memory(self._context)
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def close(self) -> None:
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)

    # ---------------------------------------------------------------- what is asked of it

    def full(self, ids: Sequence[int], last: int, *, first: int = 0) -> Tensor:
        """Logits of the last tokens of one ordinary prefill, `(last, vocabulary)` float32."""
        self._empty()
        return self._decode(ids, first, _ASKED, last)

    def stitched(
        self,
        prefix: Sequence[int],
        chunks: Sequence[Sequence[int]],
        query: Sequence[int],
        *,
        again: Collection[int] = (),
        is_behind: bool = True,
    ) -> Tensor:
        """Logits of a query behind chunks of which each saw the prefix and nothing else.

        Args:
            prefix: Ids, may be empty.
            chunks: Ids of each.
            query: Ids.
            again: Places of the prompt whose tokens are computed again where they stand, in order,
                each seeing all that stands before it.
            is_behind: Whether a chunk sees the prefix; else it sees itself alone, which is not the
                law.
        """
        self._lay(prefix, chunks, again, is_behind=is_behind)
        place = len(prefix) + sum(map(len, chunks))
        return self._decode(query, place, _ASKED, len(query))

    def answer(
        self, prefix: Sequence[int], chunks: Sequence[Sequence[int]], query: Sequence[int], n: int
    ) -> tuple[list[int], Tensor]:
        """The likeliest `n` tokens behind such a prompt, and the logits of each."""
        logits = self.stitched(prefix, chunks, query)[-1:]
        place, said, rows = len(prefix) + sum(map(len, chunks)) + len(query), list[int](), [logits]
        while len(said) < n:
            said.append(int(rows[-1].argmax()))
            rows.append(self._decode(said[-1:], place, _ASKED, 1))
            place += 1
        return said, torch.cat(rows[:n])

    def state(self, ids: Sequence[int], *, first: int = 0) -> bytearray:
        """What llama.cpp writes of these tokens, which see themselves alone."""
        self._empty()
        self._decode(ids, first, _WORK, 0)
        return bytearray(caches(self._context, _WORK + 1)[_WORK])

    def takes(self, state: bytearray) -> bytearray | None:
        """What llama.cpp writes of a sequence that it was given; None if it does not take it."""
        self._empty()
        room = (ctypes.c_uint8 * len(state)).from_buffer(state)
        if lib.llama_state_seq_set_data(self._context, room, len(state), _WORK) != len(state):
            return None
        return bytearray(caches(self._context, _WORK + 1)[_WORK])

    # ---------------------------------------------------------------- how

    def _lay(
        self,
        prefix: Sequence[int],
        chunks: Sequence[Sequence[int]],
        again: Collection[int],
        *,
        is_behind: bool,
    ) -> None:
        self._empty()
        self._decode(prefix, 0, _ASKED, 0)
        place = len(prefix)
        for chunk in chunks:
            self._drop(_WORK)
            if is_behind:  # in a copy of its own, which ends where the chunk begins
                self._decode(prefix, place - len(prefix), _WORK, 0)
            self._decode(chunk, place, _WORK, 0)
            for start, stop, is_again in _runs(place, len(chunk), again):
                if is_again:
                    self._decode(chunk[start - place : stop - place], start, _ASKED, 0)
                else:
                    lib.llama_memory_seq_cp(self._memory, _WORK, _ASKED, start, stop)
            place += len(chunk)
        self._drop(_WORK)

    def _empty(self) -> None:
        lib.llama_memory_clear(self._memory, True)

    def _drop(self, sequence: int) -> None:
        if not lib.llama_memory_seq_rm(self._memory, sequence, -1, -1):
            raise RuntimeError("llama.cpp cannot drop a sequence")

    def _decode(self, ids: Sequence[int], first: int, sequence: int, last: int) -> Tensor:
        n = len(ids)
        if not n:
            return torch.empty(0, self._vocabulary)
        batch = lib.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place] = token, first + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = place >= n - last
        code = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode: {code}")
        rows = [
            np.ctypeslib.as_array(
                lib.llama_get_logits_ith(self._context, place), (self._vocabulary,)
            ).copy()
            for place in range(n - last, n)
        ]
        return torch.from_numpy(np.array(rows, np.float32).reshape(last, self._vocabulary))


def _runs(place: int, tokens: int, again: Collection[int]) -> list[tuple[int, int, bool]]:
    """Runs of places `start..stop` of a chunk that are alike."""
    runs: list[tuple[int, int, bool]] = []
    for one in range(place, place + tokens):
        is_again = one in again
        if runs and runs[-1][2] == is_again:
            runs[-1] = runs[-1][0], one + 1, is_again
        else:
            runs.append((one, one + 1, is_again))
    return runs


def caches(context: Any, sequences: int) -> list[bytes]:
    """The states of the sequences of a context, as llama.cpp writes them."""
    found = []
    for sequence in range(sequences):
        size = lib.llama_state_seq_get_size(context, sequence)
        room = (ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(context, room, size, sequence)
        found.append(bytes(room))
    return found
