"""A transformers causal language model, as the rest of the package uses it.

Prefilling and forward passes; what names its weights is `models/weights.py`.  No
model family is named; what differs between families is measured (`models/probe.py`).
"""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.models.attention.packed import packed_attention as packed
from kvcache_rag.models.attention.placed import PlacedMask
from kvcache_rag.models.attention.support import standing, stands, stock_configs
from kvcache_rag.models.cache import (
    HaltedError,
    RecurrentCache,
    buffer_cache,
    cache_name,
    growing_cache,
    held_state,
    keep_states,
    layer_kinds,
    layer_tensors,
    own_class,
    remember,
)
from kvcache_rag.models.eval_mode import eval_mode
from kvcache_rag.models.language import Abilities, LanguageModel, StoppedError
from kvcache_rag.models.longrope import settle_frequencies
from kvcache_rag.models.probe import LayerCache, ProbeSubject, frequency_sets, measure_layout
from kvcache_rag.models.prompt_lookup import ROW_COST
from kvcache_rag.models.question_adapter import acting, question_adapter
from kvcache_rag.models.states import (
    RecurrentLayers,
    State,
    combined,
    measure_states,
    rest_of,
)
from kvcache_rag.models.weights import PACKED, Packed, Weights, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from kvcache_rag.models.rotation import LayerKind, ModelLayout

    MaskArgument = Tensor | dict[str, Tensor] | PlacedMask

# By the form of the weights: kernels for few bits take their time for every row.
_ROW_COSTS: Final = {"int8": 0.15, "int4": 0.3}
# By the form of recurrent layers' transitions: their kernels for several tokens work on whole
# blocks, so that on a processor five tokens of Mamba2 take five times as long as one.
_RECURRENT_ROW_COSTS: Final = {"none": 0.0, "scale": 1.0, "left": 0.35, "right": 0.35}


class _Computing(threading.local):
    """The model that computes undisturbed in a thread."""

    model: Any = None


_HERE = _Computing()


class TransformersModel(LanguageModel):
    """A causal language model whose context can be captured, placed and continued.

    Attributes:
        model: The transformers model, as it is; of a PEFT model, the one inside, whose layers are
            the adapter's.
        layout: What was measured, or None when nothing can be captured.
        recurrent: Its recurrent layers; None without any.
        refusal: Why nothing can be captured, or "".
        device: Where inputs go.
        takes_positions: Whether its forward pass can be told positions.
    """

    def __init__(
        self, model: Any, *, packed_attention: bool = True, window: int | None = None
    ) -> None:
        """Measure the model with a few forward passes of 12 tokens (and one of 73 with ALiBi).

        Args:
            model: A loaded transformers causal language model on one device.
            packed_attention: Whether the packed function stands in for "sdpa" (see
                `models.attention`).
            window: Longest prompt plus answer that is wanted; None for the model's own.

        Raises:
            UnsupportedModelError: If the model is spread over several devices, or partly on none;
                or has recurrent layers and an adapter for questions.
            InvalidInputError: If it is a PEFT model of learned prompts, or its frequencies cannot
                be those of so long prompts any more; or it was cast since its adapter for
                questions was put into it.
        """
        model = unwrapped(model)
        _refuse_spread(model)
        settle_frequencies(model, window)
        self.model = model
        # Those that attend by the packed function while they compute here.
        self._packed = stock_configs(model) if packed_attention else []
        self.config = model.config.get_text_config(decoder=True)
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = model.dtype
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self._takes_keep = "logits_to_keep" in parameters
        self._cache_name = cache_name(model.forward)
        self._cache_class = own_class(model)
        self.layout: ModelLayout | None = None
        self.recurrent: RecurrentLayers | None = None
        self.refusal = ""
        try:
            with self.computing(), acting(None):
                self.layout = self._measure()
        except UnsupportedModelError as error:
            self.refusal = str(error)
        self._adapter = question_adapter(model)
        if self._adapter is not None:
            self._adapter.move_to(self.device, self.dtype)
            self.ensure_attends_only(
                "and an adapter that acts on questions alone was learned for attention; load the "
                'model with adapter="none"'
            )

    def _measure(self) -> ModelLayout:
        kinds = layer_kinds(self.model.config)
        recurring = [index for index, kind in enumerate(kinds) if kind.has_state]
        if recurring:
            self.recurrent = self._measured_states(kinds, recurring)

        def capture(ids: Tensor, start: int) -> list[LayerCache]:
            cache = growing_cache(kinds)
            positions = torch.arange(start, start + ids.shape[1])  # (tokens,)
            try:
                self.forward(ids, cache, positions, keep=1)
            except (AttributeError, TypeError, ValueError) as error:
                raise UnsupportedModelError(
                    f"{self.config.model_type}: layer 0 takes no cache but its own ({error})"
                ) from error
            return layer_tensors(cache)

        def behind(ids: Tensor, others: int) -> list[LayerCache]:
            tokens, cache = others + ids.shape[1], growing_cache(kinds)
            places = torch.arange(tokens)
            is_asked = places >= others
            seen = (places[:, None] >= places) & (is_asked[:, None] == is_asked)  # (tokens, tokens)
            whole = torch.cat([ids[:, :1].expand(1, others), ids], 1)  # (1, tokens)
            if recurring:  # these would carry the others on: they begin anew at what is asked
                self.forward(whole[:, :others], cache, places[:others], keep=1)
                remember(cache, dict.fromkeys(recurring, (None, None)))
                mask = self._added(seen[others:])
                self.forward(ids, cache, places[others:], mask=mask, keep=1)
            else:
                self.forward(whole, cache, places, mask=PlacedMask(self._added(seen)), keep=1)
            return [
                kept and (kept[0][:, :, others:], kept[1][:, :, others:])
                for kept in layer_tensors(cache)
            ]

        frequencies = frequency_sets(self.model, self.config)
        limits = [own.limit for own in frequencies] + [kind.limit for kind in kinds]
        subject = ProbeSubject(
            name=str(self.config.model_type),
            capture=capture,
            behind=behind,
            kinds=kinds,
            frequencies=frequencies,
            dtype=self.dtype,
            vocabulary=int(self.config.vocab_size),
            limit=min([10**9, *self._windows, *(limit for limit in limits if limit)]),
            takes_positions=self.takes_positions,
            states=() if self.recurrent is None else self.recurrent.groups,
        )
        return measure_layout(subject)

    def _measured_states(
        self, kinds: tuple[LayerKind, ...], recurring: Sequence[int]
    ) -> RecurrentLayers:
        name = str(self.config.model_type)

        def forward(ids: Tensor, cache: Any, held: int) -> Tensor:
            return self.forward(ids, cache, torch.arange(held, held + ids.shape[1]))

        with torch.inference_mode():
            try:
                return measure_states(
                    self.model, name, recurring, forward, lambda: growing_cache(kinds)
                )
            except (AttributeError, TypeError, ValueError) as error:
                raise UnsupportedModelError(
                    f"{name}: layer {recurring[0]} takes no cache but its own ({error})"
                ) from error

    @property
    def _windows(self) -> list[int]:
        """Context windows that the config names."""
        names = ("max_position_embeddings", "n_positions", "max_seq_len")
        return [int(value) for name in names if (value := getattr(self.config, name, None))]

    @property
    def row_cost(self) -> float:
        """What a row more costs in a pass of few rows, in passes of one row (measured)."""
        packed: Packed | None = getattr(self.model, PACKED, None)
        by_weights = _ROW_COSTS.get("" if packed is None else packed.weight_format, ROW_COST)
        states = () if self.layout is None else self.layout.states
        return max([by_weights, *(_RECURRENT_ROW_COSTS[state.form] for state in states)])

    @cached_property
    def weights(self) -> Weights:
        """What names the weights; digests them when first asked for."""
        return Weights(self.model)

    def ensure_embedded(self, ids: Tensor) -> None:
        """Raise `InvalidInputError` if the model has no embedding of one of these ids."""
        embeddings = self.model.get_input_embeddings()
        count = int(getattr(embeddings, "num_embeddings", 0) or embeddings.weight.shape[0])
        highest = int(ids.max()) if ids.numel() else 0
        if highest >= count:
            raise InvalidInputError(
                f"token {highest} is beyond the model's {count} embeddings; after "
                "tokenizer.add_tokens call model.resize_token_embeddings(len(tokenizer))"
            )

    @property
    def abilities(self) -> Abilities:
        common, recurrent = super().abilities, self.recurrent
        if self.layout is None:
            return common
        common = replace(common, cannot_choose=self._why_no_choice)
        if recurrent is None:
            return common
        return replace(
            common,
            cannot_weigh=f"{self.config.model_type}: layer {recurrent.layers[0]} is recurrent, and "
            "chunks can be weighed in attention alone; use another policy",
            recompute="heads",
            batch=False,
            continues="at its end",  # a state is that behind the last token
        )

    @property
    def question_adapter(self) -> str:
        return "" if self._adapter is None else self._adapter.digest

    @contextmanager
    def on_question(self) -> Iterator[None]:
        with acting(self._adapter):
            yield

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        with acting(None):
            yield

    @property
    def _why_no_choice(self) -> str:
        """Why single tokens cannot be computed again; "" if they can."""
        if self._adapter is not None:
            return (
                "the model's adapter acts on questions alone, with which tokens of chunks would be "
                'computed again; use Reuse() or BestFew(), or adapter="none"'
            )
        if self.recurrent is not None:
            name, layer = self.config.model_type, self.recurrent.layers[0]
            return (
                f"{name}: layer {layer} is recurrent, so single tokens cannot be computed again, "
                "as what follows in their chunk depends on them; "
                "use BestFew(), Reuse(), BestLast(), Combination(), FullRecompute(), or "
                "LegoLink(n) as the policy of the engine, which then cuts chunks behind n tokens"
            )
        if not self.takes_positions and not self.measured.by_place:
            return (
                "this model cannot be told where a token stands, so single tokens cannot be "
                "computed again; use Reuse() or Combination()"
            )
        attention = str(getattr(self.config, "_attn_implementation", ""))
        if "flash" in attention or "flex" in attention:
            return (
                f"attention by {attention} takes no mask of its own for each token; load the model "
                'with attn_implementation="sdpa" to compute tokens again'
            )
        return ""

    def spec(self) -> dict[str, Any]:
        """Everything about the model that the tensors of a chunk depend on, as plain values."""
        layout = self.measured
        return {
            "model": self.weights.identity,
            "compute_dtype": str(self.dtype),
            **layout.spec(),
            "rope_parameters": repr(getattr(self.config, "rope_parameters", None)),
            **({"states": repr(layout.states)} if layout.states else {}),
        }

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the model compute within what its chunks' names promise, undisturbed by the app.

        Every pass does so by itself; around several it is looked at once.
        """
        before = _HERE.model
        if before is self.model:
            yield
            return
        # Of a pass that is watched or weighed, what was asked for stands already.
        mine = nullcontext() if stands(self._packed) else standing(self._packed, packed)
        with eval_mode(self.model), mine:
            _HERE.model = self.model
            try:
                yield
            finally:
                _HERE.model = before

    @contextmanager
    def interruptible(self, cancelled: threading.Event | None) -> Iterator[None]:
        """Let passes of this thread end before their next layer once an event is set."""
        layers = [] if cancelled is None else self._layers
        # What is compiled would be compiled anew with a hook, and again without.
        if cancelled is None or any(map(_is_compiled, (self.model, *layers))):
            yield
            return
        mine = threading.get_ident()

        def heed(*_: object) -> None:
            # An auxiliary model may be a view of this one and compute in another thread.
            if cancelled.is_set() and threading.get_ident() == mine:
                raise StoppedError

        hooks = [layer.register_forward_pre_hook(heed) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def _layers(self) -> list[torch.nn.Module]:
        """The decoder's layers; none where they are in no list of so many."""
        wanted = int(getattr(self.config, "num_hidden_layers", 0) or 0)
        lists = (one for one in self.model.modules() if isinstance(one, torch.nn.ModuleList))
        return [*next((one for one in lists if len(one) == wanted), ())]

    def forward(
        self,
        ids: Tensor,
        cache: Any,
        positions: Tensor,
        *,
        mask: MaskArgument | None = None,
        keep: int = 0,
    ) -> Tensor:
        """One forward pass.

        Args:
            ids: `(rows, n)` int64.
            cache: A transformers cache, or None for a pass without one.
            positions: `(n,)` or `(rows, n)` int64 rotary positions.
            mask: What `mask_argument` gave; None for the model's own.
            keep: Logits of how many of the last tokens, 0 for all.

        Returns:
            Logits `(rows, keep or n, vocabulary)`.
        """
        if _HERE.model is not self.model:
            with self.computing():
                return self.forward(ids, cache, positions, mask=mask, keep=keep)
        if isinstance(mask, PlacedMask):
            with mask.given(self.model, ids.shape[0]) as counted:
                return self.forward(ids, cache, positions, mask=counted, keep=keep)
        with torch.inference_mode():
            return self.graded(ids, cache, positions, mask=mask, keep=keep)

    def graded(
        self,
        ids: Tensor,
        cache: Any,
        positions: Tensor,
        *,
        mask: Tensor | dict[str, Tensor] | None = None,
        keep: int | Tensor = 0,
    ) -> Tensor:
        """The same with gradients where they are on, in whatever mode the model is.

        Logits may also be kept of single tokens, `(kept,)` int64 indices of the n.
        """
        arguments: dict[str, Any] = {self._cache_name: self.taken(cache)}
        if self.takes_positions:
            rows = positions if positions.ndim == 2 else positions[None].expand(ids.shape[0], -1)
            arguments["position_ids"] = rows.to(self.device)  # (rows, n)
        is_some = isinstance(keep, Tensor) or keep > 0
        if self._takes_keep and is_some:
            arguments["logits_to_keep"] = keep
        # Of one token, and of a pass that begins, nothing has to be carried on.
        is_carried = self.recurrent is not None and cache is not None and ids.shape[1] > 1
        with self.recurrent.carried() if is_carried and self.recurrent else nullcontext():
            output = self.model(
                input_ids=ids.to(self.device),
                attention_mask=mask,
                use_cache=cache is not None,
                **arguments,
            )
        if isinstance(cache, RecurrentCache):
            cache.held += ids.shape[1]
        logits: Tensor = output.logits  # all n of them from a model that cannot be told `keep`
        if isinstance(keep, Tensor):
            return logits if self._takes_keep else logits[:, keep]
        return logits[:, -keep:] if is_some else logits

    def taken(self, cache: Any) -> Any:
        if type(cache) is Cache:  # None stays what it is
            cache.__class__ = self._cache_class
        return cache

    def _added(self, seen: Tensor) -> Tensor:
        """`(1, 1, n, m)` to be added to scores, of what each row sees, `(n, m)` bool."""
        # Not -inf, of which softmax would make NaN in a row that sees nothing.
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill(~seen.to(self.device), torch.finfo(self.dtype).min)[None, None]

    def causal_mask(self, places: Tensor, tokens: int) -> MaskArgument:
        columns = torch.arange(tokens)
        allowed = columns[None] <= places[:, None]  # (n, tokens)
        if self.layout is not None and self.layout.by_place:
            return PlacedMask(self._added(allowed))
        return self.mask_argument(allowed, places, columns)

    def mask_argument(
        self, allowed: Tensor, indices: Tensor, columns: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """What `forward` needs so that row sees column exactly where `allowed` says, windows added.

        Args:
            allowed: `(n, m)` bool.
            indices: `(n,)` places of the rows in the prompt; windows count these.
            columns: `(m,)` places of the columns; None for those of the rows.

        Raises:
            UnsupportedModelError: If the model counts places, whatever it is told.
        """
        layout = self.measured
        if layout.by_place:
            self.ensure_takes_positions("it takes no mask for each row; use Reuse() as it is")
        columns = indices if columns is None else columns
        kinds = [kind for kind in layout.kinds if kind.has_kv]
        # Layers of one window share a mask; transformers takes one for all layers, or one per type.
        masks = {
            window: self._added(
                allowed
                if window is None
                else allowed & (indices[:, None] - columns[None, :] < window)  # (n, m)
            )
            for window in {kind.window for kind in kinds}
        }
        if len(masks) == 1:
            return masks.popitem()[1]
        pairs = zip(self.config.layer_types, self.measured.kinds, strict=False)
        return {name: masks[kind.window] for name, kind in pairs if kind.has_kv}

    def prefill(
        self, prefix: ChunkKV | None, chunks: Sequence[Sequence[int]], *, halts: bool = True
    ) -> list[ChunkKV]:
        """Compute keys and values of chunks, each behind the prefix and seeing nothing else.

        Args:
            prefix: The prefix's own cache, standing at 0; None or empty for none.
            chunks: Ids of each chunk, not empty; they form one right-padded batch, in a model with
                recurrent layers one per length.
            halts: Whether the pass ends once all keys and values are there; else the last layer
                attends, too.

        Returns:
            One `ChunkKV` per chunk on the CPU, its keys standing behind the prefix.  There they may
            be views into the memory of the batch: stores make copies of their own.
        """
        if self.recurrent is None:
            with self.computing(), acting(None):
                return self._prefill(prefix, chunks, halts)
        # A state goes on through padding: chunks of one length at a time.
        found: dict[int, ChunkKV] = {}
        for length in sorted({len(chunk) for chunk in chunks}):
            rows = [row for row, chunk in enumerate(chunks) if len(chunk) == length]
            with self.computing():
                alike = self._prefill(prefix, [chunks[row] for row in rows], halts)
            found |= zip(rows, alike, strict=True)
        return [found[row] for row in range(len(chunks))]

    def _prefill(
        self, prefix: ChunkKV | None, chunks: Sequence[Sequence[int]], halts: bool
    ) -> list[ChunkKV]:
        layout = self.measured.chunk_layout
        start = 0 if prefix is None else len(prefix)
        longest = max(map(len, chunks))
        # Per group [layers, 2, chunks, heads, start + longest, width], or K and V apart.
        buffer = KVBuffer.allocate(layout, len(chunks), start + longest, self.device)
        # (chunks, longest); padding stands behind a row's tokens, which only look back
        ids = torch.zeros(len(chunks), longest, dtype=torch.long)
        for row, chunk in enumerate(chunks):
            ids[row, : len(chunk)] = torch.tensor(chunk)
            if prefix is not None and start:
                buffer.view(row, 0, start, local_start=0, tokens=prefix.tokens).copy_from(prefix)
        self.ensure_embedded(ids)
        positions = torch.arange(start, start + longest)  # (longest,), the same in all rows
        # Nobody reads what the last layer makes of its keys and values, nor the logits.
        for states, group in zip(buffer.states, prefix.states if prefix else (), strict=False):
            for name, tensor in states.items():  # [layers, chunks, ...]
                tensor.copy_(group[name][:, None])
        kinds = self.measured.kinds
        of_head: Mapping[int, Tensor] = {}
        cut = min(max((group.head for group in layout.states), default=0), longest)
        if cut:
            cache = buffer_cache(buffer, kinds, start)
            with self._watched(buffer) as of_head:
                self.forward(ids[:, :cut], cache, positions[:cut], keep=1)
            keep_states(cache, buffer)
        cache = buffer_cache(buffer, kinds, start + cut, halts=halts)
        with suppress(HaltedError), self._watched(buffer) as of_rest:
            if cut < longest:
                self.forward(ids[:, cut:], cache, positions[cut:], keep=1)
        kept = _kept_states(buffer, cache, of_head, of_rest)
        return [
            _extract(
                buffer, row, start, chunk, [[part[:, row] for part in group] for group in kept]
            )
            for row, chunk in enumerate(chunks)
        ]

    def keep_heads(self, tokens: int) -> None:
        """From now on keep of chunks what computing so many first tokens again needs."""
        if self.layout is not None:
            # Of a convolution alone nothing is to be kept: its chunks may be cut anywhere.
            states = tuple(
                group if group.form == "none" else replace(group, head=tokens)
                for group in self.layout.states
            )
            self.layout = replace(self.layout, states=states)

    def _watched(self, buffer: KVBuffer) -> AbstractContextManager[Mapping[int, Tensor]]:
        """Around a pass that begins at a buffer's states: the transitions of recurrent layers."""
        if self.recurrent is None:
            return nullcontext({})
        before = {layer: State(*one) for layer, one in buffer.layer_states().items()}
        return self.recurrent.watched(before)

    def wait(self) -> None:
        """Wait until the device has done what it was told, so that a clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _extract(
    buffer: KVBuffer,
    row: int,
    start: int,
    chunk: Sequence[int],
    states: Sequence[Sequence[Tensor]],
) -> ChunkKV:
    tokens = torch.tensor(chunk, dtype=torch.int32)  # (tokens,)
    view = buffer.view(row, start, start + len(chunk), local_start=start, tokens=tokens)
    of_tokens = view.tensors[: len(buffer.layout.groups)]
    # On the CPU already they stay views of the buffer, [layers, 2, heads, tokens, width].
    tensors = tuple(tuple(part.cpu() for part in group) for group in (*of_tokens, *states))
    return ChunkKV(buffer.layout, tokens, start, tensors)


def _kept_states(
    buffer: KVBuffer, cache: Any, of_head: Mapping[int, Tensor], of_rest: Mapping[int, Tensor]
) -> list[list[Tensor]]:
    """Per group of recurrent layers what chunks keep of them, `[layers, rows, ...]`.

    Args:
        buffer: Holds the states behind the heads of the chunks, if they are cut.
        cache: Behind the chunks.
        of_head: The transitions of the heads, by layer.
        of_rest: Those of the rest; nothing where that is nothing.

    Raises:
        UnsupportedModelError: If a state is too large for the dtype that it is stored in.
    """
    kept, heads = [], buffer.layer_states()
    for group in buffer.layout.states:
        held = [held_state(cache, layer) for layer in group.layers]
        found: dict[str, list[Any]] = {
            "window": [window for window, _ in held],
            "state": [state for _, state in held],
            "head": [heads[layer][1] for layer in group.layers],
            "rest": [rest_of(group.form, of_head, of_rest, layer) for layer in group.layers],
        }
        found["transition"] = [
            rest if layer not in of_head else combined(group.form, of_head[layer], rest)
            for layer, rest in zip(group.layers, found["rest"], strict=True)
        ]
        parts = []
        for name, (dtype, _) in group.parts.items():
            wide = torch.stack(found[name])
            part = wide.to(dtype)
            if not bool(part.isfinite().all()):
                raise UnsupportedModelError(
                    f"layers {group.layers} have states of up to {float(wide.abs().max()):.3g}, "
                    f"which {dtype} does not hold; load the model in float32"
                )
            parts.append(part)
        kept.append(parts)
    return kept


def _is_compiled(module: torch.nn.Module) -> bool:
    by_call = getattr(module, "_compiled_call_impl", None) is not None
    return by_call or hasattr(module, "_orig_mod") or hasattr(module.forward, "_torchdynamo_inline")


def _refuse_spread(model: Any) -> None:
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        where = "spread over" if len(devices) > 1 else "on"
        why = ", where no numbers are (offloaded, or never loaded)" if "meta" in devices else ""
        raise UnsupportedModelError(
            f"the model is {where} {', '.join(sorted(devices))}{why}; load it on one device "
            '(device_map={"": 0} or "cpu")'
        )
