"""Measure where a model keeps recurrent states, and how a run of tokens changes them.

A *site* is the innermost module whose forward pass touches a state of the cache; sites are found by
watching one forward pass.  A recurrent layer is affine in the state before its tokens, with
everything else as computed from the tokens themselves: `S -> A(S) + B`.  What form `A` has is found
once, by running a site again on the same inputs from states of our choice (`fit`); what `A` is for
a chunk comes out of the run of the kernel that computes the chunk, where that is one we know
(`KERNELS`), and out of a second run of the site elsewhere.  No model family is named.
"""

from __future__ import annotations

import copy
import math
import threading
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.chunk import StateLayout
from kvcache_rag.models.cache import (
    DummyLayer,
    HaltedError,
    TappedLayer,
    beside_state,
    held_state,
)
from kvcache_rag.models.recurrent_kernels import (
    KERNELS,
    SCAN,
    carrying,
    forward_of,
    named_kernel,
    rebound,
    running,
    wide,
    with_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from kvcache_rag.kv.chunk import TensorSpec, TransitionForm

# States at which `A` is read off: so large that `B` is lost in their rounding, so far from the end
# of the dtype that a norm may square what comes of them.
_LARGE: Final = {torch.float16: 2.0**8}
_LARGE_ELSE: Final = 2.0**40

# Of what comes behind, relative: float32 is off by some 1e-6.
_TOLERANCE: Final = {torch.float32: 2e-4, torch.float64: 2e-4}
_TOLERANCE_ELSE: Final = 3e-2

# Tokens that are looked at: some, and what stands behind them.
_FRONT: Final = 6
_BEHIND: Final = 4

# Logits of several tokens behind others at once against one by one, in standard deviations.
_CONTINUES: Final = {torch.float32: 1e-3, torch.float64: 1e-3}
_CONTINUES_ELSE: Final = 0.3


@dataclass(frozen=True, eq=False)
class State:
    """What one layer remembers of a batch.

    Attributes:
        window: `(rows, channels, width)` last inputs of its convolution, or None.
        state: `(rows, ...)`, or None.
    """

    window: Tensor | None = None
    state: Tensor | None = None

    def cloned(self) -> State:
        """A copy: transformers writes states in place."""
        return State(*(None if one is None else one.clone() for one in (self.window, self.state)))


@dataclass(frozen=True, eq=False)
class _Site:
    """A module with a state.

    Attributes:
        name: Its name in the model.
        module: The module.
        layer: Index of the layer of the cache.
        slot: Which argument is the cache: a place or a name.
        cache: The class of caches that it takes.
    """

    name: str
    module: nn.Module
    layer: int
    slot: int | str
    cache: type[Cache]

    def behind(self, call: _ForwardArguments, window: Tensor | None, state: Tensor) -> Tensor:
        """The state behind the same inputs, from another one; `(rows, ...)`."""
        # What lies behind keys and values, where a site has some, is of no interest.
        layer = beside_state(TappedLayer)()
        layer.remember(window, state)
        cache = Cache(layers=[DummyLayer() for _ in range(self.layer)] + [layer])
        cache.__class__ = self.cache
        args, kwargs = call.args, call.kwargs
        if isinstance(self.slot, str):
            kwargs = {**kwargs, self.slot: cache}
        else:
            args = (*args[: self.slot], cache, *args[self.slot + 1 :])
        with suppress(HaltedError):
            self.module.forward(*args, **kwargs)
        return _there(held_state(cache, self.layer)[1])


@dataclass(frozen=True, eq=False)
class _ForwardArguments:
    """The arguments of a module's forward pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Transition:
    """How a state gets through a site.

    Attributes:
        form: How `A` is applied.
        axes: Of numbers, the axes along which it is one; the rows are axis 0.
        residual: Largest relative error over the states that it was fitted at.
    """

    form: TransitionForm
    axes: tuple[int, ...] = ()
    residual: float = 0.0

    def measured(self, site: _Site, call: _ForwardArguments, before: State) -> Tensor:
        """`A` of the inputs of a call, float32 or wider, by running the site again."""
        state = _there(before.state)
        large = _LARGE.get(state.dtype, _LARGE_ELSE)
        if self.form == "scale":
            full = site.behind(call, before.window, torch.full_like(state, large))
            full = wide(full) / large
            for axis in self.axes:
                full = full.narrow(axis, 0, 1)
            return full.clone()
        rows, columns = state.shape[-2:]
        size, room = (rows, columns) if self.form == "left" else (columns, rows)
        parts = []
        for first in range(0, size, room):  # as many columns of the identity as fit
            count = min(room, size - first)
            probe = torch.zeros_like(state)
            for place in range(count):
                row, column = first + place, place
                if self.form == "right":
                    row, column = column, row
                probe[..., row, column] = large
            got = wide(site.behind(call, before.window, probe)) / large
            parts.append(got[..., :count] if self.form == "left" else got[..., :count, :])
        return torch.cat(parts, -1 if self.form == "left" else -2)


def _there(state: Tensor | None) -> Tensor:
    if state is None:
        raise RuntimeError("a site that keeps a state kept none")
    return state


def applied(form: TransitionForm, transition: Tensor, state: Tensor) -> Tensor:
    """`A(S)` in the dtype of the state."""
    if form == "left":
        return transition.to(state) @ state
    if form == "right":
        return state @ transition.to(state)
    return transition.to(state) * state


def combined(form: TransitionForm, first: Tensor, second: Tensor) -> Tensor:
    """`A` of tokens whose first ones have one and whose others have another."""
    if form == "left":
        return second @ first
    return first @ second if form == "right" else first * second


def rest_of(
    form: TransitionForm, of_head: Mapping[int, Tensor], of_rest: Mapping[int, Tensor], layer: int
) -> Tensor | None:
    """`A` of the tokens behind a head, which may be none."""
    if layer in of_rest or layer not in of_head:
        return of_rest.get(layer)
    first = of_head[layer]
    if form == "scale":
        return torch.ones_like(first)
    return torch.eye(first.shape[-1], dtype=first.dtype, device=first.device).expand_as(first)


def _fit(site: _Site, call: _ForwardArguments, before: State, name: str) -> _Transition:
    """Which form the transition over these inputs has.

    Raises:
        UnsupportedModelError: If the state behind is not affine in the state before.
    """
    state = before.state
    if state is None:
        return _Transition("none")
    large = _LARGE.get(state.dtype, _LARGE_ELSE)
    generator = torch.Generator(device="cpu").manual_seed(7)

    def random() -> Tensor:
        return (large * torch.randn(state.shape, generator=generator)).to(state)

    probes = random(), random()
    base = wide(site.behind(call, before.window, torch.zeros_like(state)))
    seen = [wide(site.behind(call, before.window, probe)) - base for probe in probes]
    # Exactly: a strong decay leaves 1e-20, and that is not nothing (what is behind may be, too).
    if not any(bool(got.any()) for got in seen):
        return _Transition("none")
    axes = tuple(range(1, state.ndim))
    tried = [_Transition("scale", axes[count:]) for count in range(1, len(axes) + 1)]
    if state.ndim == 4:
        tried += [_Transition("left"), _Transition("right")]
    best = math.inf
    for transition in tried:
        found = transition.measured(site, call, before)
        residual = max(
            float(
                (applied(transition.form, found, wide(probe)) - got).abs().max() / got.abs().max()
            )
            for probe, got in zip(probes, seen, strict=True)
        )
        if residual < _TOLERANCE.get(state.dtype, _TOLERANCE_ELSE):
            return replace(transition, residual=residual)
        best = min(best, residual)
    raise UnsupportedModelError(
        f"{name}: layer {site.layer} ({site.name}) keeps a recurrent state that is not affine in "
        f"the one before (best residual {best:.2g})"
    )


@contextmanager
def _carried(sites: Sequence[_Site]) -> Iterator[None]:
    """Let the scans of these sites go on from their states."""
    with ExitStack() as stack:
        for site in sites:
            inner = forward_of(site.module)
            if inner is not None:  # else one that is carried already
                stack.enter_context(rebound(site.module, carrying(inner, site.layer, site.slot)))
        yield


@dataclass(frozen=True, eq=False)
class _Measuring:
    """Notes the transition of what a site computes in this thread.

    Attributes:
        site: The site.
        transition: Its form.
        before: The state that the pass begins at.
        found: By layer; written to.
    """

    site: _Site
    transition: _Transition
    before: State
    found: dict[int, Tensor]

    def by(self, kernel: str) -> AbstractContextManager[object]:
        """Around a pass.

        Args:
            kernel: Gives the transition in its own run; "" for a second run of the site.
        """
        module = self.site.module
        inner = forward_of(module) if kernel else None
        run = running(module)
        if inner is not None:
            names = {kernel: KERNELS[kernel](self._note, inner.__globals__[kernel])}
            run = with_names(inner, names)
        if "forward" in vars(module):  # an app's, which may call the class or not
            stack = ExitStack()
            stack.enter_context(rebound(module, run))
            stack.enter_context(_hooked(module, self._again))
            return stack

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = run(module, *args, **kwargs)
            with rebound(module, run):
                self._again(args, kwargs)
            return result

        return rebound(module, forward)

    def _note(self, tensor: Tensor) -> None:
        self.found[self.site.layer] = tensor

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A single token takes another kernel.
        if self.site.layer not in self.found:
            self._note(
                self.transition.measured(self.site, _ForwardArguments(args, kwargs), self.before)
            )


@contextmanager
def _hooked(
    module: nn.Module, call: Callable[[tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """Be told the arguments of a module's forward passes in this thread, behind each."""
    mine = threading.get_ident()

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        if threading.get_ident() == mine:
            call(args, kwargs)

    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# ---------------------------------------------------------------------------- what is known
@dataclass(frozen=True, eq=False)
class RecurrentLayers:
    """The recurrent layers of a model, and how states get through them.

    Attributes:
        sites: Where they are, by layer.
        transitions: Of each site.
        kernel: Of each site the name of the kernel that gives `A` in its own run, or "".
        groups: The same layers by shape, as chunks keep them.
        scans: The sites whose scans over several tokens have to be told their state.
    """

    sites: tuple[_Site, ...]
    transitions: tuple[_Transition, ...]
    kernel: tuple[str, ...]
    groups: tuple[StateLayout, ...]
    scans: tuple[_Site, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers, ascending."""
        return tuple(site.layer for site in self.sites)

    @property
    def residual(self) -> float:
        """Largest relative error of the fitted transitions."""
        return max(transition.residual for transition in self.transitions)

    def carried(self) -> AbstractContextManager[None]:
        """What passes of several tokens behind others run in."""
        return _carried(self.scans) if self.scans else nullcontext()

    @contextmanager
    def watched(self, before: Mapping[int, State]) -> Iterator[dict[int, Tensor]]:
        """Around one forward pass of several rows: the transitions of each layer, `(rows, ...)`.

        Args:
            before: Per layer the state that the pass begins at.
        """
        found: dict[int, Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(self.carried())
            for site, transition, kernel in zip(
                self.sites, self.transitions, self.kernel, strict=True
            ):
                if transition.form != "none":
                    measure = _Measuring(site, transition, before[site.layer], found)
                    stack.enter_context(measure.by(kernel))
            yield found


def measure_states(
    model: Any,
    name: str,
    layers: Sequence[int],
    forward: Callable[[Tensor, Any, int], Tensor],
    empty: Callable[[], Any],
) -> RecurrentLayers:
    """Find the recurrent sites of a model and the form of their transitions.

    Args:
        model: The model.
        name: For messages.
        layers: Those of whose cache layers states are kept.
        forward: Logits of ids `(1, n)` behind a cache that holds so many tokens.
        empty: Makes an empty cache.

    Raises:
        UnsupportedModelError: If a layer is not affine, or several tokens behind others are not
            what they are one by one.
    """
    ids = torch.tensor([[5 + 7 * place % 59 for place in range(_FRONT + _BEHIND)]])
    front, behind = ids[:, :_FRONT], ids[:, _FRONT:]
    sites, cache = _find_sites(model, name, layers, lambda held: forward(front, held, 0), empty)
    before = {site.layer: State(*held_state(cache, site.layer)).cloned() for site in sites}

    def run() -> Tensor:
        return forward(behind, copy.deepcopy(cache), _FRONT)

    single = _one_by_one(behind, copy.deepcopy(cache), forward)
    tolerance = _CONTINUES.get(model.dtype, _CONTINUES_ELSE)
    whole, calls = _watched_calls(sites, run)
    off = _off(whole, single, model.dtype)
    scans: tuple[_Site, ...] = ()
    known = tuple(site for site in sites if named_kernel(site.module, (SCAN,)))
    if known and (off > tolerance or model.dtype not in _CONTINUES):
        with _carried(known):
            carried, calls_then = _watched_calls(sites, run)
        if _off(carried, single, model.dtype) < off / 2:  # else transformers carries them itself
            scans, calls, off = known, calls_then, _off(carried, single, model.dtype)
    if not off <= tolerance:
        raise UnsupportedModelError(
            f"{name}: transformers computes several tokens behind a recurrent state otherwise than "
            f"one by one (by {off:.2g} standard deviations)"
        )
    with _carried(scans):
        # Sites of one kind are the same code; a real model has dozens.
        first: dict[tuple[Any, ...], _Site] = {}
        kinds = {site: _kind(site, before[site.layer]) for site in sites}
        for site in sites:
            first.setdefault(kinds[site], site)
        fits = {
            kind: _fit(site, calls[site.layer], before[site.layer], name)
            for kind, site in first.items()
        }
        transitions = tuple(fits[kinds[site]] for site in sites)
        kernels = tuple(named_kernel(site.module, KERNELS) for site in sites)
        groups = _groups(model, sites, transitions, before)
        found = RecurrentLayers(sites, transitions, kernels, groups, scans)
        gives = _gives(found, first, calls, before, run) if any(kernels) else set()
    kept = (
        kernel if site.layer in gives else "" for site, kernel in zip(sites, kernels, strict=True)
    )
    return replace(found, kernel=tuple(kept))


def _kind(site: _Site, state: State) -> tuple[Any, ...]:
    shapes = (None if one is None else one.shape for one in (state.window, state.state))
    return type(site.module), *shapes


def _one_by_one(ids: Tensor, cache: Any, forward: Callable[[Tensor, Any, int], Tensor]) -> Tensor:
    """Logits of tokens `(1, n)` behind a cache, each in a pass of its own."""
    steps = [
        forward(ids[:, place : place + 1], cache, _FRONT + place) for place in range(ids.shape[1])
    ]
    return torch.cat(steps, 1)


def _off(one: Tensor, other: Tensor, dtype: torch.dtype) -> float:
    """How far logits `(1, tokens, vocabulary)` are apart, in standard deviations.

    Of the worst token; in low precision of the median one, as rounding sends single tokens to other
    experts.
    """
    off = (one.float() - other.float()).abs().amax((0, 2)) / other.float().std()  # (tokens,)
    return float(off.max() if dtype in _CONTINUES else off.median())


def _watched_calls(
    sites: Sequence[_Site], run: Callable[[], Tensor]
) -> tuple[Tensor, dict[int, _ForwardArguments]]:
    """What a pass gives, and what it calls each site with."""
    calls: dict[int, _ForwardArguments] = {}
    with ExitStack() as stack:
        for site in sites:

            def keep(args: Any, kwargs: Any, layer: int = site.layer) -> None:
                calls[layer] = _ForwardArguments(args, kwargs)

            stack.enter_context(_hooked(site.module, keep))
        return run(), calls


def _gives(
    recurrent: RecurrentLayers,
    first: Mapping[tuple[Any, ...], _Site],
    calls: Mapping[int, _ForwardArguments],
    before: Mapping[int, State],
    run: Callable[[], Tensor],
) -> set[int]:
    """The layers whose kernel's run gives what a second run of the first of their kind does."""
    try:
        with recurrent.watched(before) as fast:
            run()
    except Exception:  # whatever a kernel makes of more columns
        return set()
    transitions = dict(zip(recurrent.sites, recurrent.transitions, strict=True))
    right = set()
    for kind, site in first.items():
        if transitions[site].form == "none":
            continue
        plain = transitions[site].measured(site, calls[site.layer], before[site.layer])
        found = fast[site.layer]
        if plain.shape == found.shape and bool(
            (plain - found).abs().max() <= 1e-3 * plain.abs().max()
        ):
            right.add(kind)
    return {site.layer for site in recurrent.sites if _kind(site, before[site.layer]) in right}


def _groups(
    model: Any,
    sites: Sequence[_Site],
    transitions: Sequence[_Transition],
    before: Mapping[int, State],
) -> tuple[StateLayout, ...]:
    """The layers by what they keep.

    float16 for states and matrices, which is 2.5 to 10 times closer than bfloat16; float32 for
    numbers, of which there are few, and of which 0.9985 is 1 in bfloat16.
    """
    low = torch.float16 if model.dtype.itemsize == 2 else model.dtype
    members: dict[tuple[Any, ...], list[int]] = {}
    for site, transition in zip(sites, transitions, strict=True):
        window, state = before[site.layer].window, before[site.layer].state
        one: TensorSpec | None = None
        if state is not None and transition.form in ("left", "right"):
            side = state.shape[-2 if transition.form == "left" else -1]
            one = (low, (*state.shape[1:-2], side, side))
        elif state is not None and transition.form == "scale":
            sizes = list(state.shape)
            for axis in transition.axes:
                sizes[axis] = 1
            one = (torch.promote_types(torch.float32, low), tuple(sizes[1:]))
        key = (
            None if window is None else (window.dtype, tuple(window.shape[1:])),
            None if state is None else (low, tuple(state.shape[1:])),
            one,
            transition.form,
            None if state is None else state.dtype,
        )
        members.setdefault(key, []).append(site.layer)
    return tuple(StateLayout(tuple(own), *key) for key, own in members.items())


_Running: TypeAlias = "list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]"
"""Modules whose forward passes run, the innermost last, and their arguments."""


@contextmanager
def _running(model: Any) -> Iterator[_Running]:
    """The modules of a model that run in this thread."""
    running: _Running = []
    mine = threading.get_ident()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == mine:
            running.append((module, args, kwargs))

    def leave(*_: Any) -> None:
        if threading.get_ident() == mine:
            running.pop()

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield running


def _find_sites(
    model: Any,
    name: str,
    layers: Sequence[int],
    forward: Callable[[Any], Tensor],
    empty: Callable[[], Any],
) -> tuple[tuple[_Site, ...], Any]:
    """Watch a pass over an empty cache: the modules that write to states, and the cache then."""
    found: dict[int, _Site] = {}
    names = {id(module): path for path, module in model.named_modules()}
    cache = empty()

    def note(running: _Running, layer: int) -> None:
        module, args, kwargs = running[-1]
        slots: list[int | str] = [place for place, one in enumerate(args) if one is cache]
        slots += [key for key, one in kwargs.items() if one is cache]
        if slots:
            found.setdefault(layer, _Site(names[id(module)], module, layer, slots[0], type(cache)))

    with _running(model) as running:
        for layer in layers:
            cache.layers[layer].touched = partial(note, running, layer)
        forward(cache)
    missing = [layer for layer in layers if layer not in found]
    if missing:
        raise UnsupportedModelError(
            f"{name}: layer {missing[0]} keeps a recurrent state that its modules do not write "
            "through the cache"
        )
    for layer in layers:
        cache.layers[layer].touched = None
    return tuple(found[layer] for layer in sorted(found)), cache
