"""What an answer depends on besides its prompt, as one text, for caches of answers.

Whatever might change a token is part of it.  Two texts that differ needlessly only cost a miss; one
text for two models would give the second the first one's answers.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import uuid
import weakref
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, SecretStr

from kvcache_rag.integration.references import is_remote

if TYPE_CHECKING:
    from kvcache_rag.engine import Engine

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), PurePath, Enum, date)
# Of a tokenizer, what its users switch while it works, and what it notes of its own calls.
_PASSING: Final = (
    "_tokenizer",
    "deprecation_warnings",
    "padding_side",
    "truncation_side",
    "verbose",
)
_PARTS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

# Digest of a tokenizer's vocabulary, which takes a tenth of a second, with what is seen of it.
_vocabularies: weakref.WeakKeyDictionary[Any, tuple[str, str]] = weakref.WeakKeyDictionary()
_own: dict[int, tuple[weakref.ref[Any], str]] = {}


def answer_state(engine: Engine) -> str:
    """Digest of what determines answers now: weights, adapters, tokenizer and settings."""
    return hashlib.sha256(written(_state(engine)).encode("utf-8", "surrogatepass")).hexdigest()


def written(value: Any) -> str:
    """A text that no other value has.

    Objects without a value, such as functions, are told apart by their identity in this process,
    other objects by that and their attributes.
    """
    return _written(value, ())


def _written(value: Any, above: tuple[int, ...]) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return _array(value)
    if isinstance(value, _PLAIN) or type(value).__module__ == "torch":  # such as a dtype
        return repr(value)
    if id(value) in above:
        return "..."
    kind, within = type(value).__qualname__, (*above, id(value))
    if isinstance(value, (Mapping, Set)):
        pairs = value.items() if isinstance(value, Mapping) else ((one, None) for one in value)
        parts = sorted(f"{_written(k, within)}: {_written(v, within)}" for k, v in pairs)
    elif isinstance(value, Sequence):
        parts = [_written(one, within) for one in value]
    else:
        parts = [_written(_parts(value), within)]
    return f"{kind}({', '.join(parts)})"


def _array(value: Any) -> str:
    """An array or a tensor, of which `repr` leaves out the most."""
    shape, dtype = tuple(value.shape), str(value.dtype)
    if hasattr(value, "detach"):
        flat = value.detach().cpu().reshape(-1).contiguous()
        value = flat.view(sys.modules["torch"].uint8).numpy()  # numpy has no bfloat16
    return f"array({dtype}, {shape}, {hashlib.sha256(value.tobytes()).hexdigest()})"


def _parts(value: Any) -> Any:
    """What an object is told from others by."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    # Whoever has one has loaded its module.
    for module, name in (("engine", "Engine"), ("auxiliary", "Auxiliary")):
        known = sys.modules.get(f"kvcache_rag.{module}")
        if known is not None and isinstance(value, getattr(known, name)):
            return _state(value if name == "Engine" else value.engine)
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, BaseModel):
        return vars(value)
    if type(value).__module__.startswith("transformers.") and hasattr(value, "to_dict"):
        return value.to_dict()  # a config; its attributes have hashes of this process
    is_told_apart = isinstance(value, type) or hasattr(value, "state_dict")
    own = _own_name(value)
    return own if is_told_apart or not hasattr(value, "__dict__") else (own, vars(value))


def _own_name(value: Any) -> str:
    """A name that no other object of any process ever has; of plain values in C their content."""
    at, name = id(value), uuid.uuid4().hex
    known = _own.get(at)
    if known is not None and known[0]() is value:
        return known[1]
    try:
        # An address may be another object's later, so it is no name.
        _own[at] = weakref.ref(value, lambda _: _own.pop(at, None)), name
    except TypeError:
        with suppress(Exception):  # whatever objects say that cannot be pickled
            return pickle.dumps(value).hex()
    return name


def _state(engine: Engine) -> dict[str, Any]:
    if is_remote(engine):
        return {"server": getattr(engine, "_opened", None)}
    adapter = engine._adapter
    weights, model = adapter.weights, adapter.model
    if not weights.are_unchanged():
        with engine._lock:
            weights.follow()
    return {
        "weights": weights.identity,
        "adapter": adapter.question_adapter,
        "config": model.config,
        "generation": model.generation_config,
        "place": (str(adapter.device), str(adapter.dtype)),
        "tokenizer": _tokenizer_state(engine.tokenizer),
        "codecs": [engine.store.codec, engine.combinations.codec],
        "template": engine.template,
        "policy": engine.policy,
        "namespace": engine.namespace,
        "window": engine.context_window,
        "attention": engine._options["packed_attention"],
        "rotation": engine._options["rotation"],
        "none_below": engine._options["none_below"],
        "auxiliary": engine.auxiliary,
        "gate": engine._bound.guard.gate,
    }


def _tokenizer_state(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"tokenizer": tokenizer}
    parts = [getattr(backend, name) for name in _PARTS]
    own = {name: one for name, one in vars(tokenizer).items() if name not in _PASSING}
    return {
        "vocabulary": _vocabulary(tokenizer, backend),
        "parts": [None if one is None else one.__getstate__() for one in parts],
        "added": {id_: repr(one) for id_, one in backend.get_added_tokens_decoder().items()},
        "own": own,
    }


def _vocabulary(tokenizer: Any, backend: Any) -> str:
    seen = f"{backend.get_vocab_size(with_added_tokens=False)} {backend.model!r}"
    known = _vocabularies.get(tokenizer)
    if known is None or known[0] != seen:
        known = seen, hashlib.sha256(backend.model.__getstate__()).hexdigest()
        _vocabularies[tokenizer] = known
    return known[1]
