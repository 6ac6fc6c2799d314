"""What the weights of a model are: named by their content, watched from question to question.

Adapters are switched, weights are loaded, merged and trained while an engine lives, so what names
them is compared before every question.  A comparison reads no weights but a small sample: it looks
at where the tensors lie, at torch's count of writes to each (`_version`), at the switches of PEFT's
layers.  Who writes through `.data` is seen by none of these; such a write is found by the sample,
or told of (`Engine.weights_changed`).
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import threading
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, getitem, itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import canonical_json
from kvcache_rag.models.adapters import TRAINING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOG = logging.getLogger(__name__)

# Elements per tensor that tell whether a hub model's weights were changed in this process.
SAMPLE = 4096

# Within so many comparisons every tensor is sampled once, by so many of its elements.
SAMPLE_ROUND = 16
SAMPLE_ELEMENTS = 64

# Entries of a config that change nothing about keys and values.
_IRRELEVANT = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "architectures",
        "attn_implementation",
        "dtype",
        TRAINING,
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

_VERSION = attrgetter("_version")
_DISABLED = attrgetter("_disable_adapters")
_ACTIVE = attrgetter("_active_adapter")
_MERGED = attrgetter("merged_adapters")
# A strided view of elements can be compared as integers of their size: NaN equals itself then.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


PACKED: Final = "_kvcache_rag_packed"
"""Attribute of a model whose linear layers keep their weights in another form, a `Packed`."""


@dataclass(frozen=True)
class Packed:
    """How the linear layers of a model keep their weights (see `models/linears.py`).

    Attributes:
        weight_format: The form.
        identity: What names the weights: what named them before, with the form unless the numbers
            are the same.
        parameters: How many the model had before.
    """

    weight_format: str
    identity: dict[str, Any]
    parameters: int


class OpaqueWeight:
    """A module whose weight is neither parameter nor buffer, as torch can do little with it.

    Nothing can write it; who wants another one exchanges the module.
    """

    @property
    def weight(self) -> torch.Tensor:
        """A copy of it."""
        raise NotImplementedError


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT model, with its adapters; any other model itself.

    Raises:
        InvalidInputError: If its adapter is a prompt that is learned, which no chunk stands behind.
    """
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    for name, config in model.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            raise InvalidInputError(
                f"the adapter {name!r} ({config.peft_type}) puts learned tokens before every "
                "prompt, which chunks do not stand behind; use one that changes weights, such as "
                "LoRA"
            )
    return model.get_base_model()


def model_identity(model: Any) -> dict[str, Any]:
    """Plain values that differ whenever the weights differ.

    A model from a hub is its id, its commit and a digest of samples of its weights, which notices
    weights that were changed in this process (a merged adapter, fine-tuning).  Anything else is a
    digest of all weights in memory, so that two folders with the same weights share caches and a
    changed file never meets old ones.  What PEFT's layers do with their weights is added.
    """
    return Weights(unwrapped(model)).identity


def weights_digest(model: torch.nn.Module, sample: int | None = None) -> str:
    """xxh3_128 over names, dtypes, shapes and bytes of all weights, 32 hexadecimal digits.

    Args:
        model: Its parameters and its buffers count (quantised weights are buffers), but not the
            rotary frequencies, which are part of the spec themselves.
        sample: Elements per tensor, evenly spread; None for all.
    """
    state = xxhash.xxh3_128()
    for name, tensor in _tensors(model):
        state.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().reshape(-1)  # (elements,)
        if sample is not None:
            flat = flat[:: max(1, flat.numel() // sample)]
        # Only what is sampled goes to the CPU; as bytes, because numpy has no bfloat16.
        state.update(flat.cpu().contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """By name; one at a time, as copies are made of opaque ones."""
    tensors: dict[str, Any] = dict(model.named_parameters())
    tensors.update({k: v for k, v in model.named_buffers() if "inv_freq" not in k})
    for name, module in model.named_modules():
        if isinstance(module, OpaqueWeight):
            tensors[f"{name}.weight"] = module
    for name, found in sorted(tensors.items(), key=itemgetter(0)):
        yield name, found.weight if isinstance(found, OpaqueWeight) else found


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """Where the weights of a model lay, how often they were written, and what PEFT did with them.

    Attributes:
        place: Device and dtype, as words.
        everything: Modules, parameters and buffers, each at its place in the model.
        owners: The dict of its module for each weight; for `parts`, of its parent.
        names: Its name there.
        tensors: The weights; kept, so that no other can come to lie where one of them lies.
        pointers: Where each lay.
        counted: For each whether torch counts writes to it: not if made in the inference mode.
        versions: Writes so far.
        parents: As `owners`, for `parts`.
        part_names: As `names`, for `parts`.
        parts: Modules whose exchange no other attribute shows.
        layers: PEFT's, which can be switched.
        disabled: Whether each was; then what was active in each.
        active: In copies, as PEFT changes its lists in place.
        merging: Those of `layers` that can write their adapters into the weights.
        merged: What each had written, in copies.
        scaling: Dicts of the layers that have some, and copies of them.
        samples: Of every `SAMPLE_ROUND`th weight a few elements where they lie, and copies.
        is_on_cpu: Whether they lie in main memory.
    """

    place: tuple[str, str]
    everything: list[Any]
    owners: list[dict[str, Any]]
    names: list[str]
    tensors: list[torch.Tensor]
    pointers: list[int]
    counted: list[bool]
    versions: list[int]
    parents: list[dict[str, Any]]
    part_names: list[str]
    parts: list[Any]
    layers: list[Any]
    disabled: list[bool]
    active: list[Any]
    merging: list[Any]
    merged: list[Any]
    scaling: tuple[list[dict[str, float]], list[dict[str, float]]]
    samples: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    is_on_cpu: bool

    @classmethod
    def of(cls, model: Any) -> _Snapshot:
        """The model as it is now."""
        weights, parts = [*_weights(model)], [*_parts(model)]
        tensors = [owner[name] for owner, name in weights]
        counted = [not tensor.is_inference() for tensor in tensors]
        layers = [part for part in model.modules() if hasattr(part, "_disable_adapters")]
        merging = [layer for layer in layers if hasattr(layer, "merged_adapters")]
        scaling = [layer.scaling for layer in layers if "scaling" in vars(layer)]
        return cls(
            place=(str(model.device), str(model.dtype)),
            everything=_everything(model),
            owners=[owner for owner, _ in weights],
            names=[name for _, name in weights],
            tensors=tensors,
            pointers=[*map(torch.Tensor.data_ptr, tensors)],
            counted=counted,
            versions=[*map(_VERSION, compress(tensors, counted))],
            parents=[parent for parent, _ in parts],
            part_names=[name for _, name in parts],
            parts=[parent[name] for parent, name in parts],
            layers=layers,
            disabled=[*map(_DISABLED, layers)],
            active=[copy.copy(layer._active_adapter) for layer in layers],
            merging=merging,
            merged=[[*layer.merged_adapters] for layer in merging],
            scaling=(scaling, [dict(values) for values in scaling]),
            samples=_samples(tensors, model.device),
            is_on_cpu=model.device.type == "cpu",
        )

    def samples_hold(self) -> bool:
        """Whether all samples have the elements that they had."""
        return all(all(map(torch.equal, views, values)) for views, values in self.samples)

    def is_same(self, other: _Snapshot) -> bool:
        """Whether another snapshot tells of the same weights, with as many writes to them."""
        mine = (self.pointers, self.versions, self.merged, [*map(id, self.everything)])
        return mine == (other.pointers, other.versions, other.merged, [*map(id, other.everything)])

    def is_switched(self) -> bool:
        """Whether PEFT's layers do something else now, or have merged or unmerged."""
        return (
            [*map(_MERGED, self.merging)] != self.merged
            or [*map(_DISABLED, self.layers)] != self.disabled
            or [*map(_ACTIVE, self.layers)] != self.active
            or self.scaling[0] != self.scaling[1]
        )

    @property
    def adapters(self) -> str:
        """Digest of what PEFT's layers do; "" without any."""
        if not self.layers:
            return ""
        active = [[names] if isinstance(names, str) else [*names] for names in self.active]
        scaling = [sorted(values.items()) for values in self.scaling[1]]
        state = repr((self.disabled, active, self.merged, scaling))
        return hashlib.sha256(state.encode()).hexdigest()


class Weights:
    """The weights of a model, which may be changed between any two questions.

    `are_unchanged` is safe from any thread; `follow` is for whoever holds the model.

    Attributes:
        identity: What they were when they were last followed (see `model_identity`); the same
            object as long as that is the same.
        turn: Comparisons so far.
        mistrusted: Chunks that were computed in this turn or later, under an earlier identity, may
            be of other weights, because a sample found a write of which nothing had told.
    """

    def __init__(self, model: Any) -> None:
        """Digest all weights of a transformers model (see `unwrapped`)."""
        self._model = model
        self._lock = threading.Lock()
        self._is_written = self._is_told = False
        self._content: dict[str, Any] | None = None
        self._known: dict[str, dict[str, Any]] = {}  # by what PEFT's layers do
        self.turn = self.mistrusted = 0
        self._snapshot = _Snapshot.of(model)
        self.identity = self._identified()

    def are_unchanged(self) -> bool:
        """Whether nothing is seen to have changed since `follow`; reads no weights but a sample.

        A question waits for it, so every line is a loop in C.
        """
        known = self._snapshot
        self.turn += 1
        try:
            tensors = [*map(getitem, known.owners, known.names)]
            views, values = known.samples[self.turn % SAMPLE_ROUND]
            return (
                not self._is_told
                and [*map(torch.Tensor.data_ptr, tensors)] == known.pointers
                and [*map(_VERSION, compress(tensors, known.counted))] == known.versions
                and [*map(getitem, known.parents, known.part_names)] == known.parts
                and not (known.layers and known.is_switched())
                # Each comparison waits for the device: one there, instead of several.
                and (
                    all(map(torch.equal, views, values))
                    if known.is_on_cpu or not views
                    else torch.equal(torch.cat(views), torch.cat(values))
                )
            )
        except (KeyError, RuntimeError, TypeError):  # a name is gone, or is of no counted tensor
            return False

    def written(self) -> None:
        """Take it that any weight may have been written."""
        self._is_told = True

    def follow(self) -> dict[str, Any]:
        """The identity as it is now, digesting what may have been written.

        Raises:
            InvalidInputError: If the model was moved or cast, so that what was measured of it
                holds no longer.
        """
        with self._lock:
            before, now = self._snapshot, _Snapshot.of(self._model)
            if now.place != before.place:
                raise InvalidInputError(
                    f"the model computed in {before.place[1]} on {before.place[0]} when its "
                    f"engine was made, and computes in {now.place[1]} on {now.place[0]} now; "
                    "make a new engine of it"
                )
            is_silent = not self._is_told and before.is_same(now)
            found = is_silent and not before.samples_hold()
            if found:
                self.mistrusted = max(0, self.turn - SAMPLE_ROUND)
                _LOG.warning(
                    "weights of the model were written through .data; chunks of the last "
                    "%d questions are dropped: call Engine.weights_changed() after such a write",
                    SAMPLE_ROUND,
                )
            if found or not is_silent:
                self._content, self._known, self._is_written = None, {}, True
            self._snapshot, self._is_told = now, False
            identity = self._identified()
            if identity != self.identity:
                self.identity = identity
            return self.identity

    def _identified(self) -> dict[str, Any]:
        if self._content is None:
            self._content = self._digested()
        adapters = self._snapshot.adapters
        if adapters not in self._known:
            what = {"adapters": adapters} if adapters else {}
            self._known[adapters] = {**self._content, **what}
        return self._known[adapters]

    def _digested(self) -> dict[str, Any]:
        packed: Packed | None = getattr(self._model, PACKED, None)
        if packed is None:
            return self._digested_weights()
        if not self._is_written:
            return packed.identity
        return {**packed.identity, "written": weights_digest(self._model)}

    def _digested_weights(self) -> dict[str, Any]:
        config = self._model.config
        commit = getattr(config, "_commit_hash", None)
        quantization = getattr(config, "quantization_config", None)
        identity: dict[str, Any] = {
            "type": str(config.model_type),
            "quantization": None if quantization is None else repr(quantization),
        }
        if commit and not self._is_written and not getattr(self._model, "peft_config", None):
            sample = weights_digest(self._model, SAMPLE)
            name = str(config._name_or_path)
            return {**identity, "id": name, "revision": commit, "sample": sample}
        weights = weights_digest(self._model)
        return {**identity, "weights": weights, "config": _config_digest(config)}


def _config_digest(config: Any) -> str:
    values = {k: repr(v) for k, v in config.to_diff_dict().items() if k not in _IRRELEVANT}
    return hashlib.sha256(canonical_json(values)).hexdigest()


def _everything(model: torch.nn.Module) -> list[Any]:
    return [
        kept
        for module in model.modules()
        for place in (module._modules, module._parameters, module._buffers)
        for name, kept in place.items()
        if "inv_freq" not in name
    ]


def _weights(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the weights are kept, tied ones twice."""
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            for name, tensor in place.items():
                # Rotary frequencies are of the spec, and some kinds are written by forward passes.
                if tensor is not None and "inv_freq" not in name:
                    yield place, name


def _has_weights(module: torch.nn.Module) -> bool:
    return any(True for _ in _weights(module)) or any(
        isinstance(part, OpaqueWeight) for part in module.modules()
    )


def _parts(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the modules with weights are kept; of the parts of a PEFT layer one per adapter."""
    children = {
        name: child
        for name, child in module._modules.items()
        if child is not None and _has_weights(child)
    }
    adapters: dict[str, dict[str, Any]] = {}
    for name, child in children.items():
        if hasattr(module, "_disable_adapters") and isinstance(child, torch.nn.ModuleDict):
            adapters.update(dict.fromkeys(child._modules, child._modules))
        else:
            yield module._modules, name
            yield from _parts(child)
    for name, place in adapters.items():
        yield place, name


def _samples(
    tensors: list[torch.Tensor], device: torch.device
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    kept = [
        tensor
        for tensor in tensors
        if tensor.numel() and tensor.is_contiguous() and tensor.device == device
    ]
    samples = []
    for first in range(SAMPLE_ROUND):
        views = [*map(_spread, kept[first::SAMPLE_ROUND])]
        samples.append((views, [view.clone() for view in views]))
    return samples


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """`(elements,)` integers, spread over the memory of a tensor and over its columns."""
    step = max(1, tensor.numel() // SAMPLE_ELEMENTS)
    while math.gcd(step, tensor.shape[-1] if tensor.ndim else 1) != 1:
        step -= 1
    spread = tensor.detach().view(-1)[::step][:SAMPLE_ELEMENTS]
    return spread.view(_INTEGERS[tensor.element_size()])
