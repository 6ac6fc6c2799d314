"""Eight streams over stitched chunks: transformers' continuous batching beside our padded batches.

    python -m benchmarks.continuous

SmolLM2-135M-Instruct, greedy, prompts of exact length (`peers_prompts`), each with its own order of
the same chunks, all of them stored.  "padded" is one `Engine.generate_batch`; "continuous" is
transformers' own manager on sdpa, whose paged cache is filled with the same stitched contexts, so
that it computes the questions only.  The sides take turns, over the same form of weights; loading
counts on both.  One load has answers of one length, the other of 8 to 64 tokens: there a padded
batch goes on until its longest answer ends.  The end of an answer is its length alone.  sdpa's mask
hides the keys of other streams, but they are computed; so passes of 48 tokens, one question beside
the steps of others, serve "continuous" better than all questions at once (`--batch-tokens 512`).

Nothing of transformers is replaced.  A request enters with its context computed by setting two
fields of a `RequestState` that users are not told of (`position_offset`,
`remaining_prefill_tokens`), after memory was taken for it and written through the cache's own
`can_store_request_tokens`, `get_write_indices` and `update`.  Private is one name alone: the
manager's `_wake_up_loop`, without which its thread looks for requests every 0.1 s.

Answers of both sides have to be equal, or to part where two tokens were as good as equal
(`guesses`).  The profile is of one more round, with clocks around functions of both sides.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteria
from transformers.generation.continuous_batching import PagedAttentionCache, RequestState
from transformers.integrations import sdpa_attention

from benchmarks.decoding import interval
from benchmarks.guesses import WRONG, Watch, exact_logits, verdict
from benchmarks.machine import commit, described, load
from benchmarks.peers_prompts import CHUNK, material, template_of
from kvcache_rag import Engine, Reuse
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.cache import BufferLayer
from kvcache_rag.models.linears import PackedLinear
from kvcache_rag.models.pretrained import load as load_model
from kvcache_rag.models.pretrained import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from kvcache_rag.generation.context import CopiedRow

RESULTS: Final = Path(__file__).parent / "results" / "continuous.json"
PADDED, CONTINUOUS = "padded", "continuous"
STREAMS: Final = 8
CONTEXT: Final = 2048
LOADS: Final = {
    "answers of one length": (64,) * STREAMS,
    "answers of 8 to 64": tuple(range(8, 72, 8)),
}
BAR: Final = 1.15  # times the tokens a second of padded batches
PAGE: Final = 256
NEVER: Final = 3  # <repo_name>, given as the end of answers, which are to end by their length alone


@dataclass(frozen=True)
class Question:
    """One request, and its chunks in their order."""

    text: str
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Round:
    """What one side made of all requests.

    Attributes:
        ids: The answers.
        started: `time.perf_counter()` at the call.
        loaded: Seconds for loading and stitching contexts and putting them in place.
        firsts: The clock at the first token of each answer.
        ended: The clock at the end.
    """

    ids: tuple[tuple[int, ...], ...]
    started: float
    loaded: float
    firsts: tuple[float, ...]
    ended: float

    @property
    def rate(self) -> float:
        """Tokens a second of all streams, loading and questions included."""
        return sum(map(len, self.ids)) / (self.ended - self.started)

    @property
    def step(self) -> float:
        """Seconds of one step behind the last first token; the longest answer begins last."""
        return (self.ended - max(self.firsts)) / (max(map(len, self.ids)) - 1)


class Lengths(StoppingCriteria):
    """Ends each row of a batch behind its number of tokens."""

    def __init__(self, prompt: int, lengths: Sequence[int]) -> None:
        """Behind `prompt` tokens."""
        self._ends = prompt + torch.tensor(lengths)  # (rows,)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self._ends  # (rows,) bool


class Padded:
    """One padded batch."""

    def __init__(self, engine: Engine, questions: Sequence[Question], width: int) -> None:
        """Ask an engine that has stored all chunks; prompts have `width` tokens, all of them."""
        self.engine, self.model, self._width = engine, engine.model, width
        self._asked = [(question.text, question.chunks) for question in questions]

    def run(self, lengths: Sequence[int]) -> Round:
        """Answer everything."""
        started = time.perf_counter()
        answers = self.engine.generate_batch(
            self._asked,
            max_new_tokens=max(lengths),
            eos_token_id=NEVER,
            stopping_criteria=[Lengths(self._width, lengths)],
        )
        ended = time.perf_counter()
        costs = [answer.metrics for answer in answers]
        if any(one.misses or one.declined or not one.hits for one in costs):
            raise SystemExit("a padded batch was not stitched from the store")
        return Round(
            # What stands behind the end of a row is padding.
            tuple(row.token_ids[:end] for row, end in zip(answers, lengths, strict=True)),
            started,
            sum(one.load + one.stitch for one in costs),
            tuple(started + one.ttft for one in costs),
            ended,
        )

    @contextmanager
    def watched(self) -> Iterator[list[dict[int, Tensor]]]:
        """Logits `(vocabulary,)` of every token of every answer that is decoded meanwhile."""
        seen: list[dict[int, Tensor]] = [{} for _ in self._asked]

        def note(module: Any, inputs: Any, logits: Tensor) -> None:
            for row, last in zip(seen, logits[:, -1].float(), strict=True):  # (rows, 1, vocabulary)
                row[len(row)] = last

        hook = self.model.get_output_embeddings().register_forward_hook(note)
        try:
            yield seen
        finally:
            hook.remove()


class Continuous:
    """transformers' continuous batching over contexts that an engine stitches."""

    def __init__(
        self, engine: Engine, model: Any, questions: Sequence[Question], batch_tokens: int
    ) -> None:
        """Start its thread, over a model of its own: sdpa is what it takes.

        Args:
            engine: Has stored all chunks.
            model: The same weights, in the same form.
            questions: As for `Padded`.
            batch_tokens: Most tokens of one forward pass.
        """
        self.model, self._engine = model, engine
        self._questions = questions
        most = max(map(max, LOADS.values()))
        longest = max(len(self.row(question, most).ids) for question in questions) + most
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=NEVER, pad_token_id=NEVER),
            ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=len(questions) * -(-longest // PAGE),  # nobody is ever preempted
                max_batch_tokens=batch_tokens,
                max_requests_per_batch=len(questions),
                safety_margin=0.0,
                allow_block_sharing=False,  # its hashes are of tokens, and ours stand elsewhere
                auto_switch_to_flash=False,
            ),
        )
        self._manager.warmup()  # makes the cache
        self._processor = self._manager.batch_processor
        self._manager.start()

    def row(self, question: Question, new: int) -> CopiedRow:
        """The prompt of a question over its stitched context, in the engine's buffer."""
        answerer = self._engine._answerer
        if answerer.filler is None:
            raise SystemExit("the model keeps no chunks")
        request = self._engine._planner.request(
            question.text, question.chunks, policy=self._engine.policy, max_new_tokens=new
        )
        with torch.inference_mode():
            return answerer.filler.choose(answerer.prompt(request, 0, ""))

    def _state(self, number: int, new: int) -> RequestState:
        """A request whose context lies in the paged cache; the thread is not at work."""
        row = self.row(self._questions[number], new)
        if row.loaded.misses or row.loaded.declined or not row.loaded.hits:
            raise SystemExit("a context was not stitched from the store")
        cache, held, ids = self._processor.cache, row.shape.context_tokens, row.ids.tolist()
        state = RequestState(
            request_id=str(number),
            initial_tokens=ids,
            max_new_tokens=new,
            eos_token_id=NEVER,
            record_timestamps=True,
        )
        if not cache.can_store_request_tokens(state, held):
            raise SystemExit("the paged cache is too small")
        nothing = torch.empty(0, dtype=torch.int64)  # is read back
        with torch.inference_mode():
            places: dict[str, Tensor] = {
                name: torch.tensor(allocator.get_write_indices(state.request_id, 0, held))
                for name, allocator in cache.cache_allocators.items()
            }
            for layer, slots in row.stitched.buffer.slots().items():
                allocator = cache.layer_to_allocator[layer]
                # (held, heads, width), as pages have it
                keys, values = (slot[0, :, :held].transpose(0, 1) for slot in slots)
                allocator.update(keys, values, layer, nothing, places[allocator.layer_type])
        state.position_offset, state.remaining_prefill_tokens = held, ids[held:]
        return state

    def run(self, lengths: Sequence[int]) -> Round:
        """Answer everything."""
        started = time.perf_counter()
        with self._manager.pause():  # the thread takes no lock of ours
            for number, new in enumerate(lengths):
                self._manager.input_queue.put(self._state(number, new))
            loaded = time.perf_counter() - started
            self._manager._wake_up_loop.set()
        outputs: dict[int, Any] = {}
        while len(outputs) < len(lengths):
            output = self._manager.get_result(timeout=600)
            if output is None or output.error:
                raise SystemExit(f"continuous batching failed: {output and output.error}")
            outputs[int(output.request_id)] = output
        ended = time.perf_counter()
        answers = [outputs[number] for number in range(len(lengths))]
        return Round(
            tuple(tuple(answer.generated_tokens) for answer in answers),
            started,
            loaded,
            tuple(answer.timestamps[0] for answer in answers),
            ended,
        )

    @contextmanager
    def watched(self) -> Iterator[list[dict[int, Tensor]]]:
        """As of `Padded`; which requests a step is for stands in its inputs."""
        seen: list[dict[int, Tensor]] = [{} for _ in self._questions]

        def note(module: Any, inputs: Any, logits: Tensor) -> None:
            batch = self._processor.inputs_and_outputs.requests_in_batch
            numbers = [int(one.state.request_id) for one in batch if one.has_new_token]
            # (1, rows, vocabulary); rows of questions that are not all in are at the end, unused
            for number, last in zip(numbers, logits[0, : len(numbers)].float(), strict=True):
                seen[number][len(seen[number])] = last

        hook = self.model.get_output_embeddings().register_forward_hook(note)
        try:
            yield seen
        finally:
            hook.remove()

    def close(self) -> None:
        """End its thread."""
        self._manager.stop(block=True, timeout=60)


@dataclass(frozen=True)
class Call:
    """A call of a function: of which part of the work, when it ended, and its seconds."""

    part: str
    ended: float
    seconds: float


FORWARD: Final = "forward pass"
ATTENTION, REPEATING = "attention", "repeating keys and values per head"
CACHE, LINEARS = "writing to and reading from the cache", "linear layers"


@contextmanager
def clocks(model: Any) -> Iterator[list[Call]]:
    """Note calls of what takes a step's time, on whichever side, in whatever thread."""
    calls: list[Call] = []

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*values: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            result = function(*values, **options)
            ended = time.perf_counter()
            calls.append(Call(part, ended, ended - begun))
            return result

        return run

    linears = {
        type(part)
        for part in model.modules()
        if type(part) is torch.nn.Linear or isinstance(part, PackedLinear)
    }
    places: list[tuple[str, Any, str]] = [
        (FORWARD, type(model), "forward"),
        *((LINEARS, linear, "forward") for linear in linears),
        (ATTENTION, few_queries, "attend"),
        (ATTENTION, torch.nn.functional, "scaled_dot_product_attention"),
        (REPEATING, sdpa_attention, "repeat_kv"),
        (CACHE, BufferLayer, "update"),
        (CACHE, PagedAttentionCache, "update"),
    ]
    with ExitStack() as stack:
        for part, owner, name in places:
            stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        yield calls


def profile(side: Padded | Continuous, lengths: Sequence[int]) -> dict[str, dict[str, float]]:
    """Milliseconds by what they went to: of everything to the first tokens, and of a step."""
    with clocks(side.model) as calls:
        done = side.run(lengths)
    first = max(done.firsts)
    found = {}
    for name, begun, ended in (
        ("first tokens", done.started + done.loaded, first),
        ("step", first, done.ended),
    ):
        own = [call for call in calls if begun < call.ended <= ended]
        passes = [call.seconds for call in own if call.part == FORWARD]
        steps = 1 if name == "first tokens" else len(passes)
        parts = {
            part: sum(call.seconds for call in own if call.part == part)
            for part in (LINEARS, ATTENTION, REPEATING, CACHE)
        }
        parts["norms, rotations, activations, masks"] = sum(passes) - sum(parts.values())
        parts["outside of the forward pass"] = ended - begun - sum(passes)
        parts["all"] = ended - begun
        found[name] = {part: 1e3 * seconds / steps for part, seconds in parts.items()}
        found[name]["passes"] = len(passes)
    found["first tokens"]["loading, before that"] = 1e3 * done.loaded
    return found


@dataclass(frozen=True)
class Checked:
    """Answers of both sides to one load, and how they compare."""

    ids: dict[str, tuple[tuple[int, ...], ...]] = field(repr=False)
    verdicts: list[dict[str, Any]]


def checked(padded: Padded, continuous: Continuous, exact: Any, lengths: Sequence[int]) -> Checked:
    """Whether both sides say the same, or part at a tie.

    Args:
        padded: One side.
        continuous: The other one.
        exact: The same weights in float32.
        lengths: Tokens of each answer.
    """
    with padded.watched() as ours:
        one = padded.run(lengths)
    with continuous.watched() as theirs:
        other = continuous.run(lengths)
    verdicts = []
    for number, new in enumerate(lengths):
        plain, paged = Watch(one.ids[number]), Watch(other.ids[number])
        if len(plain.ids) != new or len(paged.ids) != new:
            raise SystemExit(f"an answer does not have {new} tokens")
        plain.logits, paged.logits = ours[number], theirs[number]
        if plain.ids != paged.ids:
            row = continuous.row(continuous._questions[number], new)
            held = row.shape.context_tokens
            plain.fresh = row.ids[None, held:]
            for keys, values in row.stitched.buffer.slots().values():
                plain.held.append((keys[:, :, :held].float(), values[:, :, :held].float()))
            compared = verdict(plain, paged, exact_logits(exact, plain))
        else:
            compared = verdict(plain, paged, torch.empty(0))
        verdicts.append(asdict(compared))
    return Checked({PADDED: one.ids, CONTINUOUS: other.ids}, verdicts)


def measured(
    sides: dict[str, Padded | Continuous], lengths: Sequence[int], right: Checked, rounds: int
) -> list[dict[str, Any]]:
    """Both sides in turns; ratios are of the same round."""
    seen: dict[str, list[Round]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in sorted(sides, reverse=bool(turn % 2)):
            done = sides[name].run(lengths)
            if done.ids != right.ids[name]:
                raise SystemExit(f"{name} answered otherwise than before")
            seen[name].append(done)
    rows = []
    for name, found in seen.items():
        pairs = zip(found, seen[PADDED], strict=True)
        firsts = [first - done.started for done in found for first in done.firsts]
        rows.append(
            {
                "side": name,
                "tokens/s": interval([done.rate for done in found]),
                "times padded's": interval([one.rate / other.rate for one, other in pairs]),
                "s to the first token": interval(firsts),
                "of which loading, s": statistics.median(done.loaded for done in found),
                "ms a step": interval([1e3 * done.step for done in found]),
                "s": interval([done.ended - done.started for done in found]),
            }
        )
        print(rows[-1], flush=True)
    return rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, and whether it is above the bar."""
    made = material(load_tokenizer("smollm2", {}), CONTEXT)
    count = CONTEXT // CHUNK
    prompts = [made.prompt(CONTEXT, number + 1, number) for number in range(STREAMS)]
    questions = [Question(one["question"], tuple(one["texts"])) for one in prompts]
    width = len(prompts[0]["context"]) + len(prompts[0]["query"])
    before = load()
    template = template_of(made.system)
    # Copied, as into pages; in place, a batch would read chunks that its streams share once.
    how: dict[str, Any] = {"dtype": options.dtype, "device": "cpu"}
    engine = Engine.from_pretrained(
        "smollm2", adapter="none", template=template, policy=Reuse(), rotation="copied", **how
    )
    engine.add(made.texts[:count])
    model, *_ = load_model("smollm2", options={}, weight_format="auto", **how)
    exact = load_model("smollm2", options={}, weight_format="plain", **how)[0].float()
    padded = Padded(engine, questions, width)
    continuous = Continuous(engine, model, questions, options.batch_tokens)
    report: dict[str, Any] = {
        "command": "python -m benchmarks.continuous",
        **described("cpu", options.threads),
        "commit": commit(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "streams": STREAMS,
        "tokens of chunks": CONTEXT,
        "tokens of a prompt": width,
        "tokens of a continuous pass": options.batch_tokens,
        "rounds": options.rounds,
        "load before": before,
        "loads": {},
    }
    try:
        for name, lengths in LOADS.items():
            right = checked(padded, continuous, exact, lengths)
            wrong = sum(one["said"] == WRONG for one in right.verdicts)
            print(f"{name}: {[one['said'] for one in right.verdicts]}", flush=True)
            sides: dict[str, Padded | Continuous] = {PADDED: padded, CONTINUOUS: continuous}
            report["loads"][name] = {
                "new tokens": lengths,
                "answers": right.verdicts,
                "wrong": wrong,
                "rows": measured(sides, lengths, right, options.rounds),
                "ms": {side: profile(sides[side], lengths) for side in sides},
            }
            print(json.dumps(report["loads"][name]["ms"], indent=1), flush=True)
    finally:
        continuous.close()
    report["load after"] = load()
    ratios = {
        name: one["rows"][1]["times padded's"]["value"] for name, one in report["loads"].items()
    }
    report["above the bar"] = {name: ratio >= BAR for name, ratio in ratios.items()}
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the report; 1 if answers differ by more than rounding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="auto: the checkpoint's own, bfloat16")
    parser.add_argument(
        "--batch-tokens", type=int, default=48, help="of one continuous pass: a question, and steps"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    report = run(options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    wrong = sum(one["wrong"] for one in report["loads"].values())
    print(f"above the bar of {BAR}: {report['above the bar']}, wrong: {wrong}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
