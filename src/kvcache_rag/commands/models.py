"""Can the chunks of a model be moved and put together?

Nothing is looked up in a list of model families; the answer is measured on the model itself.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvcache_rag.commands.options import add_model, add_options, ready

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from kvcache_rag.kv.chunk import ChunkLayout
    from kvcache_rag.models.language import LanguageModel
    from kvcache_rag.models.rotation import FrequencySet, LayerGroup, ModelLayout
    from kvcache_rag.models.states import RecurrentLayers
    from kvcache_rag.settings import EngineSettings

HELP = "say whether chunks of a model can be stitched"
_CHECK = "say whether chunks of a model can be stitched, and how its keys turn"
SUPPORTED, UNSUPPORTED = 0, 1
_UNLIMITED = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `check MODEL` and how to load it."""
    from kvcache_rag.settings import EngineSettings

    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help=_CHECK, description=_CHECK)
    add_model(check)
    add_options(check, EngineSettings, "backend", "adapter", "weight_format", "revision", "dtype")


def run(arguments: argparse.Namespace) -> int:
    """Load the model, print what was measured and a verdict: 0 if it is supported, 1 if not."""
    from kvcache_rag.settings import EngineSettings

    settings = EngineSettings.from_source(arguments)
    ready(settings)
    from kvcache_rag.models.pretrained import language_model

    model = language_model(_load(settings))
    print("\n".join(_describe(arguments.model, model)))
    reason = model.abilities.cannot_stitch
    if reason:
        print(f"verdict         not movable: {reason}; full prefill works")
        return UNSUPPORTED
    print("verdict         supported: chunks can be stitched")
    return SUPPORTED


def _load(settings: EngineSettings) -> Any:
    from kvcache_rag.models.model_names import chosen_adapter
    from kvcache_rag.models.pretrained import load

    model, _, _ = load(
        settings.model,
        dtype=settings.dtype,
        device=None,
        options={"revision": settings.revision} if settings.revision else {},
        adapter=chosen_adapter(settings.model, settings.adapter),
        weight_format=settings.weight_format,
        backend=settings.backend,
    )
    return model


def _describe(name: str, model: LanguageModel) -> Iterator[str]:
    window = model.window(None)
    yield f"model           {name} ({type(model.model).__name__})"
    yield f"dtype           {_plain(model.dtype)}"
    yield f"context window  {f'{window} tokens' if window < _UNLIMITED else 'not stated'}"
    if model.layout is not None:
        yield from _describe_layout(model.layout)
    if model.recurrent is not None and model.layout is not None:
        yield from _describe_states(model.recurrent)


def _describe_layout(layout: ModelLayout) -> Iterator[str]:
    yield f"layers          {_kinds(layout)}"
    yield f"cache           {_bytes(layout.chunk_layout)}"
    if layout.limit is not None:
        yield f"length          {layout.limit} tokens: {layout.beyond}"
    turned = _turned_by(layout)
    fixed = [own.limit for own in turned.values() if own.limit is not None]
    yield f"frequencies     {f'fixed up to {min(fixed)} tokens' if fixed else 'fixed'}"
    for index, frequencies in turned.items():
        values = frequencies.at_rest
        ends = f"{float(values.max()):.4g} to {float(values.min()):.4g} radians per position"
        yield f"  set {index}         {frequencies.name}: {values.numel()}, {ends}"
    yield f"groups          {len(layout.groups)}"
    for index, group in enumerate(layout.groups):
        yield f"  group {index}       {_describe_group(group)}"
    yield f"residual        {layout.residual:.1e} (relative, first layer)"


def _turned_by(layout: ModelLayout) -> dict[int, FrequencySet]:
    """The sets of frequencies by which something turns, by their numbers."""
    both = ((group.key_rotation, group.value_rotation) for group in layout.groups)
    used = {one.frequency for pair in both for one in pair if one.style != "none"}
    return {index: layout.frequencies[index] for index in sorted(used)}


def _kinds(layout: ModelLayout) -> str:
    """How many layers there are of each kind, if they are of several."""
    counts = Counter[str](kind.keeps for kind in layout.kinds)
    nothing = "without a cache" if layout.states else "of them read another layer's cache"
    told = {"state": "with a state", "both": "with a state beside keys and values"}
    told |= {"kv": "with keys and values"} if layout.states else {}
    parts = [f"{counts[kind]} {what}" for kind, what in (*told.items(), ("nothing", nothing))]
    return ", ".join([str(len(layout.kinds)), *(part for part in parts if part[0] != "0")])


def _bytes(layout: ChunkLayout) -> str:
    """What a chunk takes, by its tokens."""
    fixed = layout.nbytes(0)
    each = layout.nbytes(1) - fixed
    if not fixed:
        return f"{each} bytes per token"
    if not each:
        return f"{fixed} bytes per chunk, however long it is"
    return (
        f"{each} bytes per token and {fixed} bytes per chunk; a chunk of more than "
        f"{-(-fixed // each)} tokens is mostly keys and values"
    )


_FORMS = {
    "none": "none",
    "scale": "numbers",
    "left": "a matrix from the left",
    "right": "a matrix from the right",
}


def _describe_states(recurrent: RecurrentLayers) -> Iterator[str]:
    yield f"states          {len(recurrent.groups)}"
    for index, group in enumerate(recurrent.groups):
        specs = {"window": group.window, "state": group.state, "transition": group.transition}
        parts = [f"layers {_ranges(group.layers)}"]
        for name, spec in specs.items():
            form = f" ({_FORMS[group.form]})" if name == "transition" else ""
            if spec is not None:
                shape = "x".join(map(str, spec[1]))
                parts.append(f"{name} {shape} {_plain(spec[0])}{form}")
        yield f"  state {index}       {'; '.join(parts)}"
    yield f"residual        {recurrent.residual:.1e} (relative, transitions of states)"


def _describe_group(group: LayerGroup) -> str:
    shapes = group.layout
    slots = (
        ("keys", shapes.key_shape, group.key_rotation),
        ("values", shapes.value_shape, group.value_rotation),
    )
    parts = [f"layers {_ranges(shapes.layers)}"]
    for slot, (heads, width), rotation in slots:
        place = "" if rotation.style == "none" else f" by set {rotation.frequency}"
        parts.append(f"{slot} {heads}x{width} rotation {rotation}{place}")
    parts.append(f"window {group.window or 'none'}")
    return "; ".join(parts)


def _ranges(layers: Sequence[int]) -> str:
    """Ascending indices in short: `0-3,5`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
