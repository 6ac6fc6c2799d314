"""What happens to every token of a prompt: reused or computed, without an answer.

What is said is what `generate` would do now: the same plan, gate, lock and choice of tokens.
Nothing is computed that it would not compute, and where the policy chooses without reading chunks
or looking at keys and values, nothing is computed at all.  The prompt is shown also where none of
the chunks says what is asked (`none_below`), so that nothing would be generated.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvcache_rag.prompt.alignment import token_offsets
from kvcache_rag.stitching.stitch import StitchedPrompt, first_positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.generation.context import Prompt
    from kvcache_rag.generation.request import Request
    from kvcache_rag.generation.runner import Runner
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.prefill import ContextChunk
    from kvcache_rag.stitching.stitch import SpanKind


TokenState: TypeAlias = Literal["reused", "prefilled", "recomputed", "computed"]
"""`reused`: keys and values are cached; `prefilled`: the chunk is computed alone first, because it
is not cached; `recomputed`: computed again in the context of the whole prompt; `computed`: the
query, chunks computed with it, and everything in a full prefill."""


@dataclass(frozen=True)
class ExplainedToken:
    """One token of a prompt.

    Attributes:
        id: Its id in the vocabulary.
        text: What it adds to the prompt's text; "" for a token without text, and for all but the
            last of several tokens that write one character.
        position: Position of its keys when the model answers.
        state: What happens to it.
    """

    id: int
    text: str
    position: int
    state: TokenState


@dataclass(frozen=True)
class ExplainedSpan:
    """A half-open run of tokens of a prompt.

    Attributes:
        kind: What the tokens are.
        start: First token.
        stop: One past the last token.
        tier: Store tier that a chunk would be loaded from; "" if it is not cached, in a full
            prefill, and for prefix and query.
    """

    kind: SpanKind
    start: int
    stop: int
    tier: str = ""


@dataclass(frozen=True)
class Explained:
    """A prompt, token by token.  The counts mean what they mean in `Metrics`.

    Attributes:
        tokens: All tokens of the prompt; their joined texts are its text.
        spans: Prefix (may be empty), chunks in prompt order, query.
        policy: The policy that answers, as it can be pasted back.
        positions: Where the chunks are placed.
        gate: Why the engine's gate lets `FullRecompute()` answer instead, or "".
        prefix_tokens: Tokens of the shared prefix.
        reused_tokens: Tokens of chunks whose keys and values come from the store.
        recomputed_tokens: Context tokens that the policy computes again.
        prefilled_tokens: Chunk tokens that are not cached.
        query_tokens: Tokens of history, question and everything else after the chunks.
        choose: Seconds that choosing tokens took; nothing is recomputed.
        fresh_tokens: Tokens of chunks that the policy computes together with the query.
        answered_from: Numbers, among those given, of the chunks in the prompt, in prompt order.
        unused_chunks: Chunks left out because the policy answers from better ones.
    """

    tokens: tuple[ExplainedToken, ...]
    spans: tuple[ExplainedSpan, ...]
    policy: str
    positions: PositionScheme
    gate: str
    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    prefilled_tokens: int
    query_tokens: int
    choose: float = field(default=0.0, compare=False)
    fresh_tokens: int = 0
    answered_from: tuple[int, ...] = ()
    unused_chunks: int = 0

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


FEWEST_NEW = 1  # a prompt that leaves no room for a single token of an answer is refused


@dataclass(frozen=True, eq=False)
class _Choice:
    """What becomes of the context of a prompt.

    Attributes:
        tiers: Per chunk the tier it would be loaded from, or "".
        prefilled: Per chunk whether it is computed by itself first; None if nothing is reused.
        selected: `(context_tokens,)` bool, tokens computed again; None for none.
        seconds: That choosing these took.
    """

    tiers: tuple[str, ...]
    prefilled: tuple[bool, ...] | None
    selected: Tensor | None = None
    seconds: float = 0.0


def explained(runner: Runner, asked: Request, request: Request) -> Explained:
    """Explain a request; `asked` has the chunks as the caller named them, one by one."""
    prompt = runner.prompt(request, 0, "")
    members = asked.rounds[0]
    brought = members[: len(members) - len(prompt.fresh)]
    if runner.loader is not None:
        brought = tuple(map(runner.loader.known, brought))
    members = (*brought, *prompt.fresh)
    joint = any(chunk.is_joint for chunk in prompt.chunks)
    prefix = runner.renderer.prefix_ids
    ids = [*prefix, *(token for chunk in members for token in chunk.ids), *asked.query]
    runner.ensure_planned(request, len(ids))
    shape = StitchedPrompt.from_sizes(len(prefix), list(map(len, members)), len(asked.query))
    # As it is computed: chunks that the policy wants computed there are part of the query.
    held = StitchedPrompt.from_sizes(len(prefix), list(map(len, brought)), len(prompt.query))
    named = zip(prompt.chunks, brought, strict=not joint)
    chunks = prompt.chunks if joint else tuple(b if a.key != b.key else a for a, b in named)
    choice = _choice(runner, prompt, chunks)
    states, places = _states(held, choice, joint=joint), _positions(held, request.policy, choice)
    pieces = _texts(runner, asked, members)
    found = choice.tiers * len(members) if joint else choice.tiers
    tiers = ("", *found, *[""] * len(prompt.fresh), "")
    chunk_tokens = sum(map(len, brought))
    prefilled = chunk_tokens
    if choice.prefilled is not None:
        sizes = [chunk_tokens] if joint else [len(member) for member in brought]
        prefilled = sum(size for size, new in zip(sizes, choice.prefilled, strict=True) if new)
    return Explained(
        tokens=tuple(map(ExplainedToken, ids, pieces, places, states)),
        spans=tuple(
            ExplainedSpan(span.kind, span.start, span.stop, tier)
            for span, tier in zip(shape.spans, tiers, strict=True)
        ),
        policy=repr(request.policy),
        positions=request.policy.positions,
        gate=request.gate,
        prefix_tokens=len(prefix),
        reused_tokens=chunk_tokens - prefilled,
        recomputed_tokens=states.count("recomputed"),
        prefilled_tokens=prefilled,
        query_tokens=len(asked.query),
        choose=choice.seconds,
        fresh_tokens=prompt.fresh_tokens,
        answered_from=tuple(chunk.place for chunk in members),
        unused_chunks=request.unused_chunks,
    )


def _choice(runner: Runner, prompt: Prompt, chunks: tuple[ContextChunk, ...]) -> _Choice:
    runner.ensure_possible(prompt)
    if runner.context_builder is None or runner.is_full(prompt):
        return _Choice(("",) * len(chunks), None)
    tiers = runner.context_builder.loader.for_chunks(chunks).tiers(chunks)
    firsts = [
        chunk.key not in {earlier.key for earlier in chunks[:at]} for at, chunk in enumerate(chunks)
    ]
    prefilled = tuple(first and not tier for first, tier in zip(firsts, tiers, strict=True))
    if prompt.policy.is_reuse:
        return _Choice(tiers, prefilled)
    try:
        row = runner.context_builder.choose(replace(prompt, chunks=chunks))
    except BaseException:
        runner.memory.forget()  # as when an answer fails
        raise
    return _Choice(tiers, prefilled, row.selected, row.choosing)


def _states(shape: StitchedPrompt, choice: _Choice, *, joint: bool) -> list[TokenState]:
    if choice.prefilled is None:
        return ["computed"] * shape.tokens
    states: list[TokenState] = ["reused"] * shape.context_tokens
    prefilled = choice.prefilled * len(shape.chunks) if joint else choice.prefilled
    for span, new in zip(shape.chunks, prefilled, strict=True):
        if new:
            states[span.start : span.stop] = ["prefilled"] * len(span)
    if choice.selected is not None:
        for place in choice.selected.nonzero()[:, 0].tolist():  # places in the prompt
            states[place] = "recomputed"
    return states + ["computed"] * (shape.tokens - shape.context_tokens)


def _positions(shape: StitchedPrompt, policy: ReusePolicy, choice: _Choice) -> list[int]:
    """Where keys stand, as `placed` and `recompute` have it."""
    places = list(range(shape.tokens))
    if choice.prefilled is None or policy.positions == "reordered":
        return places
    spans, behind = shape.spans[:-1], shape.spans[0].stop
    computed_at = [(behind if span.kind == "chunk" else 0, len(span)) for span in spans]
    first = first_positions(computed_at, policy.positions, adjacent=policy.adjacent_query)
    recomputed = set() if choice.selected is None else set(choice.selected.nonzero()[:, 0].tolist())
    for span, start in zip(spans, first, strict=True):
        for place in range(span.start, span.stop):
            if place not in recomputed:
                places[place] = start + place - span.start
    return places


def _texts(runner: Runner, asked: Request, members: Sequence[ContextChunk]) -> list[str]:
    """What each token of the prompt adds to its text."""
    tokenizer, renderer = runner.tokenizer, runner.renderer
    parts = [(renderer.prefix_text, renderer.prefix_ids)]
    for chunk in members:
        text = chunk.text or ""
        is_usual = not renderer.has_control(text)
        written = renderer.template.wrap(text) if is_usual else renderer.chunk_text(text)
        if text and tuple(renderer.encoder.encode(written)) == chunk.ids:
            parts.append((written, chunk.ids))
        else:  # known by its key alone
            read = tokenizer.decode(
                list(chunk.ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            parts.append((read, chunk.ids))
    written = renderer.query_text(asked.question, asked.history)
    parts.append((written, asked.query))
    return [piece for text, ids in parts for piece in _pieces(tokenizer, text, ids)]


def _pieces(tokenizer: Any, text: str, ids: Sequence[int]) -> list[str]:
    """What each token adds to a text; what no token stands for goes with the one behind it."""
    bos: str = getattr(tokenizer, "bos_token", None) or ""
    habit = bool(bos) and ids[:1] == (tokenizer.bos_token_id,) and not text.startswith(bos)
    pieces, place = [""] * habit, 0
    offsets = token_offsets(tokenizer, text, ids[len(pieces) :])
    following = [start for start, _ in offsets[1:]] + [len(text)]
    for (_, stop), start in zip(offsets, following, strict=True):
        # The last of several tokens over one character has it.
        end = max(min(stop, start), place)
        pieces.append(text[place:end])
        place = end
    if pieces:
        pieces[-1] += text[place:]
    return pieces
