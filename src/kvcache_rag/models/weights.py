"""What the weights of a model are: named by their content, watched from question to question.

Adapters are switched, weights are loaded, merged and trained while an engine lives, so what names
them is compared before every question.  A comparison reads no weights: it looks at where the
tensors lie, at torch's count of writes to each (`_version`), at the switches of PEFT's layers.  A
write through `.data` is seen by none of these, and has to be told of (`Engine.weights_changed`).
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import canonical_json
from kvcache_rag.models.adapters import TRAINING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Elements per tensor that tell whether a hub model's weights were changed in this process.
SAMPLE = 4096

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


@dataclass(frozen=True)
class _State:
    """What shows that the weights of a model are others: compared before every question.

    Attributes:
        place: Device and dtype, as words.
        weights: Per module its identity; per parameter and buffer its identity, where it lies and
            torch's count of writes to it (0 if made in the inference mode, where none are counted).
        merged: Per layer of PEFT which adapters it has written into its weights.
        disabled: Per layer of PEFT whether it is switched off.
        active: Which adapters are on in it.
        scaling: How they are weighed.
        kept: The modules and tensors, so that no other can come to lie where one of them lies.
    """

    place: tuple[str, str]
    weights: list[int]
    merged: list[list[str]]
    disabled: list[bool]
    active: list[list[str]]
    scaling: list[list[tuple[str, float]]]
    kept: list[Any] = field(compare=False)

    @classmethod
    def of(cls, model: Any) -> _State:
        """The model as it is now."""
        weights: list[int] = []
        layers: list[Any] = []
        kept: list[Any] = []
        rest = [model]
        while rest:  # `modules()` takes three times as long, and a question waits for it
            module = rest.pop()
            parts = vars(module)
            kept.append(module)
            weights.append(id(module))
            for tensors in (parts["_parameters"], parts["_buffers"]):
                for name, tensor in tensors.items():
                    # Rotary frequencies are of the spec, and forward passes write some kinds.
                    if tensor is not None and "inv_freq" not in name:
                        kept.append(tensor)
                        count = 0 if tensor.is_inference() else tensor._version
                        weights += (id(tensor), tensor.data_ptr(), count)
            if hasattr(type(module), "_disable_adapters"):
                layers.append(module)
            rest += [part for part in reversed(parts["_modules"].values()) if part is not None]
        active = [layer._active_adapter for layer in layers]
        return cls(
            (str(model.device), str(model.dtype)),
            weights,
            [[*layer.merged_adapters] for layer in layers if hasattr(layer, "merged_adapters")],
            [layer._disable_adapters for layer in layers],
            [[names] if isinstance(names, str) else [*names] for names in active],
            [sorted(layer.scaling.items()) for layer in layers if "scaling" in vars(layer)],
            kept,
        )

    @property
    def adapters(self) -> str:
        """Digest of what PEFT's layers do; "" without any."""
        if not self.disabled:
            return ""
        state = repr((self.disabled, self.active, self.merged, self.scaling))
        return hashlib.sha256(state.encode()).hexdigest()


class Weights:
    """The weights of a model, which may be changed between any two questions.

    `are_unchanged` is safe from any thread; `follow` is for whoever holds the model.

    Attributes:
        identity: What they were when they were last followed (see `model_identity`); the same
            object as long as that is the same.
    """

    def __init__(self, model: Any) -> None:
        """Digest all weights of a transformers model (see `unwrapped`)."""
        self._model = model
        self._lock = threading.Lock()
        self._is_written = self._is_told = False
        self._content: dict[str, Any] | None = None
        self._known: dict[str, dict[str, Any]] = {}  # by what PEFT's layers do
        self._state = _State.of(model)
        self.identity = self._identified()

    def are_unchanged(self) -> bool:
        """Whether nothing is seen to have changed since `follow`; reads no weights."""
        try:
            return not self._is_told and _State.of(self._model) == self._state
        except RuntimeError:  # another thread is changing the model
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
            before, now = self._state, _State.of(self._model)
            if now.place != before.place:
                raise InvalidInputError(
                    f"the model computed in {before.place[1]} on {before.place[0]} when its "
                    f"engine was made, and computes in {now.place[1]} on {now.place[0]} now; "
                    "make a new engine of it"
                )
            if self._is_told or (now.weights, now.merged) != (before.weights, before.merged):
                self._content, self._known, self._is_written = None, {}, True
            self._state, self._is_told = now, False
            identity = self._identified()
            if identity != self.identity:
                self.identity = identity
            return self.identity

    def _identified(self) -> dict[str, Any]:
        if self._content is None:
            self._content = self._digested()
        adapters = self._state.adapters
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
