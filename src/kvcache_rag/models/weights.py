"""The identity of a model's weights: named by their content, checked at every question.

Adapters are switched, weights are loaded, merged and trained while an engine lives, so what names
them is compared before every question.  A comparison reads no weights: it looks at where the
tensors lie, at torch's count of writes to each (`_version`), at the switches of PEFT's layers.  A
write through `.data` is seen by none of these, and has to be told of (`Engine.weights_changed`).

What else changes the numbers of a pass is part of the name, too: hooks, a config that was changed,
how torch multiplies float32.  What cannot be (`eval_mode.py`) is kept away from our passes.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash

from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.forks import new_lock
from kvcache_rag.kv.chunk import canonical_json
from kvcache_rag.models.adapters import TRAINING
from kvcache_rag.models.cache import layer_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvcache_rag.models.rotation import LayerKind

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

# Of these nothing about keys and values depends, either; names of chunks had them all along.
_UNWATCHED = _IRRELEVANT | {
    "_attn_implementation_internal",
    "_commit_hash",
    "_experts_implementation_internal",
    "_output_attentions",
    "bos_token_id",
    "eos_token_id",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
}

# Hooks of these look on, or work out a weight of others that are watched.
_OWN_HOOKS = frozenset({"accelerate", "kvcache_rag", "peft", "torch", "transformers"})

# Frequencies of these kinds are written by forward passes.
_WRITTEN_FREQUENCIES = frozenset({"dynamic", "longrope"})

PACKED: Final = "_kvcache_rag_packed"
"""Attribute of a model whose linear layers keep their weights in another form, a `Packed`."""


@dataclass(frozen=True)
class Packed:
    """How the linear layers of a model keep their weights (see `weight_formats.py`).

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


_PARALLEL: Final = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


def bare_model(model: Any) -> Any:
    """What `torch.compile` or a parallel wrapper of torch has inside; any other model itself.

    Passes over caches that grow would be compiled anew, token by token.
    """
    while True:
        parts = vars(model).get("_modules", {}) if isinstance(model, torch.nn.Module) else {}
        if "_orig_mod" in parts:
            model = parts["_orig_mod"]
        elif isinstance(model, _PARALLEL):
            model = model.module
        else:
            return model


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT model, with its adapters; any other model itself.

    Raises:
        InvalidInputError: If layers of it are compiled, or its adapter is a prompt that is learned,
            which no chunk stands behind, or one that chooses by the whole prompt where it is in
            force.
    """
    model = bare_model(model)
    _refuse_adapters(model)
    is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    found = bare_model(model.get_base_model()) if is_peft else model
    _refuse_compiled(found)
    return found


def _refuse_compiled(model: Any) -> None:
    for path, module in model.named_modules():
        if "_orig_mod" in module._modules:
            raise InvalidInputError(
                f"{path} of {type(model).__name__} is compiled by torch.compile, for which caches "
                "that grow are other code at each token; put what it has inside (_orig_mod) in its "
                "place"
            )


def _refuse_adapters(model: Any) -> None:
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise InvalidInputError(
                f"the adapter {name!r} ({config.peft_type}) puts learned tokens before every "
                "prompt, which chunks do not stand behind; use one that changes weights, such as "
                "LoRA"
            )
        if getattr(config, "alora_invocation_tokens", None) is not None:
            raise InvalidInputError(
                f"the adapter {name!r} is an activated LoRA (alora_invocation_tokens), in force "
                "from where a prompt invokes it, which is not followed here; delete it from the "
                "model, or use a LoRA without invocation tokens"
            )
        if str(getattr(config, "peft_type", "")).endswith("XLORA"):
            raise InvalidInputError(
                f"the adapter {name!r} (X-LoRA) weighs its experts by the whole prompt, which "
                "chunks do not know; use a LoRA instead"
            )


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
        precision: How torch multiplies float32, if the model is of it and it may round more.
        config: Entries of the config and of those within it.
        frequencies: Where the rotary frequencies lie that no pass writes, as `weights`.
        hooks: What the app has a pass call, by the place of the module, -1 for all modules.
        weights: Per module its identity; per parameter and buffer its identity, where it lies and
            torch's count of writes to it (0 if made in the inference mode, where none are counted).
        sample: Some numbers of the last layer of PEFT, whose hotswapping writes through `.data`.
        merged: Per layer of PEFT which adapters it has written into its weights.
        disabled: Per layer of PEFT whether it is switched off.
        active: Which adapters are on in it.
        scaling: How they are weighed.
        kept: The modules and tensors, so that no other can come to lie where one of them lies.
    """

    place: tuple[str, str]
    precision: str
    config: dict[str, Any]
    frequencies: list[int]
    hooks: list[tuple[int, Any]]
    weights: list[int]
    sample: str
    merged: list[list[str]]
    disabled: list[bool]
    active: list[list[str]]
    scaling: list[list[tuple[str, float]]]
    kept: list[Any] = field(compare=False)

    @classmethod
    def from_model(cls, model: Any) -> _State:
        """The model as it is now."""
        weights: list[int] = []
        frequencies: list[int] = []
        hooks = [(-1, hook) for hooks in _EVERYWHERE for hook in hooks.values()]
        layers: list[Any] = []
        kept: list[Any] = []
        rest = [model]
        while rest:  # `modules()` takes three times as long, and a question waits for it
            module = rest.pop()
            own = vars(module)
            kept.append(module)
            weights.append(id(module))
            for tensors in (own["_parameters"], own["_buffers"]):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    # Rotary frequencies are of the spec.
                    if "inv_freq" not in name:
                        seen = weights
                    elif _are_written(module):
                        continue
                    else:
                        seen = frequencies
                    kept.append(tensor)
                    count = 0 if tensor.is_inference() else tensor._version
                    seen += (id(tensor), tensor.data_ptr(), count)
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
                hooks += [(len(kept), hook) for hook in _called(own)]
            if hasattr(type(module), "_disable_adapters"):
                layers.append(module)
            rest += [part for part in reversed(own["_modules"].values()) if part is not None]
        active = [layer._active_adapter for layer in layers]
        return cls(
            (str(model.device), str(model.dtype)),
            _precision(model),
            dict(_entries(model.config)),
            frequencies,
            [one for one in hooks if not _is_own(one[1])],
            weights,
            _sample(layers[-1]) if layers else "",
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
        return _digest(repr((self.disabled, self.active, self.merged, self.scaling)))


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
        self._lock = new_lock()
        self._is_written = self._is_told = False
        self._content: dict[str, Any] | None = None
        self._known: dict[str, dict[str, Any]] = {}  # by what is beside the weights
        self._state = self._made = _State.from_model(model)
        self._frequencies = _frequencies(model)
        self._kinds = _kinds(model)
        self._numbers = _numbers(model)
        self._are_other_numbers = False
        # What a hook does cannot be told, so chunks with it have names that nobody else finds.
        self._hooks: list[Any] = []
        self._here = uuid.uuid4().hex
        self.identity = self._identified()

    def are_unchanged(self) -> bool:
        """Whether nothing is seen to have changed since `follow`; reads no weights."""
        try:
            return not self._is_told and _State.from_model(self._model) == self._state
        except RuntimeError:  # another thread is changing the model
            return False

    def written(self) -> None:
        """Take it that any weight, or a number that a module keeps, may have been written."""
        self._is_told = True

    def follow(self) -> dict[str, Any]:
        """The identity as it is now, digesting what may have been written.

        Raises:
            InvalidInputError: If the model was moved or cast, or its config or frequencies
                changed, so that what was measured of it holds no longer; or as `unwrapped`.
        """
        with self._lock:
            before, now = self._state, _State.from_model(self._model)
            if now.place != before.place:
                raise InvalidInputError(
                    f"the model computed in {before.place[1]} on {before.place[0]} when its "
                    f"engine was made, and computes in {now.place[1]} on {now.place[0]} now; "
                    "make a new engine of it"
                )
            self._ensure_as_measured(now)
            if self._is_told:
                self._are_other_numbers = _numbers(self._model) != self._numbers
            seen = (now.weights, now.sample, now.merged)
            if self._is_told or seen != (before.weights, before.sample, before.merged):
                self._content, self._known, self._is_written = None, {}, True
            self._state, self._is_told = now, False
            identity = self._identified()
            if identity != self.identity:
                self.identity = identity
            return self.identity

    def _ensure_as_measured(self, now: _State) -> None:
        _refuse_adapters(self._model)
        changed = ""
        if now.config != self._made.config and (
            now.config.get("rope_parameters") != self._made.config.get("rope_parameters")
            or _kinds(self._model) != self._kinds
        ):
            changed = "config says other layers, windows or rotary parameters"
        elif now.frequencies != self._made.frequencies:
            found = _frequencies(self._model)
            pairs = zip(found, self._frequencies, strict=False)
            if len(found) != len(self._frequencies) or not all(
                one.shape == other.shape and torch.equal(one, other) for one, other in pairs
            ):
                changed = "rotary frequencies are others"
        if changed:
            raise InvalidInputError(
                f"the model's {changed} than when its engine was made; make a new engine of it"
            )

    def _identified(self) -> dict[str, Any]:
        if self._content is None:
            self._content = self._digested()
        beside = self._beside()
        key = repr(beside)
        if key not in self._known:
            self._known[key] = {**self._content, **beside}
        return self._known[key]

    def _beside(self) -> dict[str, str]:
        """What names chunks beside the weights, as far as it is not as usual."""
        now, beside = self._state, dict[str, str]()
        if now.adapters:
            beside["adapters"] = now.adapters
        if now.precision:
            beside["float32"] = now.precision
        if now.config != self._made.config:
            beside["changed_config"] = _digest(repr(sorted(now.config.items())))
        if self._are_other_numbers:
            beside["numbers"] = _digest(repr(_numbers(self._model)))
        if now.hooks:
            calls = [(number, self._number(hook)) for number, hook in now.hooks]
            beside["hooks"] = _digest(repr((self._here, os.getpid(), calls)))
        return beside

    def _number(self, hook: Any) -> int:
        """Of a function, which is kept, so that no other can have it."""
        for number, known in enumerate(self._hooks):
            if known is hook:
                return number
        self._hooks.append(hook)
        return len(self._hooks) - 1

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
        values = {k: repr(v) for k, v in config.to_diff_dict().items() if k not in _IRRELEVANT}
        digest = hashlib.sha256(canonical_json(values)).hexdigest()
        return {**identity, "weights": weights, "config": digest}


# Hooks of all modules.
_EVERYWHERE: Final = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
)


def _called(own: Mapping[str, Any]) -> list[Any]:
    """What an app has a module call: its hooks, and a forward pass that was put into it."""
    called = [*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()]
    return [*called, own["forward"]] if "forward" in own else called


def _is_own(hook: Any) -> bool:
    home = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return home.partition(".")[0] in _OWN_HOOKS


def _are_written(module: Any) -> bool:
    kinds = getattr(module, "rope_type", None)
    return not _WRITTEN_FREQUENCIES.isdisjoint(
        kinds.values() if isinstance(kinds, dict) else (kinds,)
    )


def _frequencies(model: Any) -> list[torch.Tensor]:
    """Copies of the rotary frequencies that no pass writes."""
    return [
        tensor.detach().clone()
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and "inv_freq" in name and not _are_written(module)
    ]


def _numbers(model: Any) -> list[tuple[str, str, float]]:
    """What modules keep as plain numbers: scalings, epsilons."""
    return [
        (path, name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    ]


def _kinds(model: Any) -> tuple[LayerKind, ...] | None:
    try:
        return layer_kinds(model.config)
    except UnsupportedModelError:
        return None


def _sample(layer: torch.nn.Module) -> str:
    numbers = [tensor.detach().reshape(-1)[:4].tolist() for tensor in layer.parameters()]
    return repr(numbers)


def _precision(model: Any) -> str:
    if model.dtype != torch.float32:
        return ""
    backend = torch.backends.cuda if model.device.type == "cuda" else torch.backends.mkldnn
    found = str(getattr(backend.matmul, "fp32_precision", ""))
    return "" if found in ("none", "ieee") else found


def _entries(config: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """What a config says, and the configs within it."""
    for name, value in vars(config).items():
        if name in _UNWATCHED:
            continue
        if hasattr(value, "to_diff_dict"):
            yield from _entries(value, f"{before}{name}.")
        else:
            plain = isinstance(value, str | int | float | None)
            yield before + name, value if plain else repr(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
