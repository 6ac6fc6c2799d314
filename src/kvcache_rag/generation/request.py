"""One question, checked and tokenised, and its chunks split into prompts that fit the window.

Nothing is loaded or computed yet; every mistake of a caller is found here.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from kvcache_rag.errors import (
    ContextTooLongError,
    FingerprintMismatchError,
    InvalidInputError,
    check_list,
)
from kvcache_rag.generation.grammar import is_held
from kvcache_rag.generation.question import ReadingReport, StoredChunk
from kvcache_rag.kv.chunk import ChunkKey
from kvcache_rag.models.generate import checked_generation
from kvcache_rag.policies import FullRecompute, ReusePolicy
from kvcache_rag.policies.base import Plan
from kvcache_rag.policies.policy_registry import no_policy
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag.prefill import ContextChunk
from kvcache_rag.prompt.scores import ranking
from kvcache_rag.prompt.template import ChatArguments, as_messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvcache_rag.generation.question import ChunkInput
    from kvcache_rag.metrics import MissReason
    from kvcache_rag.policies.relevance import Numbers
    from kvcache_rag.prefill import Prefiller
    from kvcache_rag.prompt.renderer import PromptRenderer
    from kvcache_rag.prompt.template import Message


Asked: TypeAlias = (
    "tuple[str, Sequence[ChunkInput]]"
    "| tuple[str, Sequence[ChunkInput], Sequence[Message | Mapping[str, str]]]"
    "| tuple[str, Sequence[ChunkInput], Sequence[Message | Mapping[str, str]],"
    " Sequence[float] | None]"
    "| tuple[str, Sequence[ChunkInput], Sequence[Message | Mapping[str, str]],"
    " Sequence[float] | None, str]"
)
"""A question with its chunks, its history, the chunks' scores and what is asked, as far as it has
them."""

DEFAULT_NEW_TOKENS = 128

Overflow = Literal["error", "drop_lowest", "refine"]
"""`error`: refuse; `drop_lowest`: leave out the chunks with the lowest scores, or the last ones
(retrievers put the best first); `refine`: several stitched prompts, each improving the answer of
the one before."""


NONE_SAYS: Final = "None of the documents says it."
"""The answer where no chunk makes the question likely enough (`none_below`)."""


@dataclass(frozen=True)
class Request:
    """A question ready to be answered.

    Attributes:
        question: As the caller wrote it.
        query: Ids of history, question and generation prompt (of the first round).
        history: Earlier turns.
        rounds: Chunks per prompt, in prompt order; more than one with `overflow="refine"`.
        fresh: How many of the last of each are computed together with the query.
        dropped_chunks: Chunks left out because they do not fit.
        policy: What to reuse.
        max_new_tokens: Of the answer.
        stop: Strings before which the answer ends; the markers of documents among them, unless
            it is held to a schema, which may ask for one.
        options: Further arguments of `generate()`.
        started: `time.perf_counter()` at the call.
        prefix_mismatch: Carried into the metrics.
        arguments: Tools and other values for the chat template.
        skip_special_tokens: Whether control tokens are left out of the answer's text.
        is_plain: Whether it is a text to continue, without template and chunks.
        gate: Why another policy answers than was asked for, or "".
        references: Chunks whose reference holds, carried into the metrics.
        answer_tokens: How many of the last ids of the query are an answer that is read.
        unused_chunks: Chunks left out because the policy answers from better ones.
        asked: What is asked, by itself.
        wants: Chunks, by their numbers, behind which that is to be read before the policy plans
            again (`ReusePolicy.wants`).
        none_below: Nats by which a chunk has to make the question likelier, if any has to.
        says_none: Whether no chunk says what is asked, so that `NONE_SAYS` is the answer.
        read: What was read.
    """

    question: str
    query: tuple[int, ...]
    history: tuple[Message | Mapping[str, Any], ...]
    rounds: tuple[tuple[ContextChunk, ...], ...]
    fresh: tuple[int, ...]
    dropped_chunks: int
    policy: ReusePolicy
    max_new_tokens: int
    stop: tuple[str, ...]
    options: dict[str, Any]
    started: float
    prefix_mismatch: bool = False
    arguments: ChatArguments | None = None
    skip_special_tokens: bool = True
    is_plain: bool = False
    gate: str = ""
    references: int = 0
    answer_tokens: int = 0
    unused_chunks: int = 0
    asked: str = ""
    wants: tuple[Numbers, ...] = ()
    none_below: float | None = None
    says_none: bool = False
    read: ReadingReport = field(default_factory=ReadingReport)

    def by_full_prefill(self) -> Request:
        """The same, with everything computed."""
        return replace(self, policy=FullRecompute(), fresh=(0,) * len(self.rounds))


class OtherLengthsError(Exception):
    """Chunks are longer than their references said, and do not fit; no caller sees it."""


def listed_chunks(chunks: Iterable[ChunkInput] | None) -> list[ChunkInput]:
    """Chunks as a list; raises `InvalidInputError` if they are something else."""
    return check_list("chunks", chunks, "texts or keys")


def retrieved_chunks(
    question: str,
    chunks: Sequence[ChunkInput],
    scores: Sequence[float] | None,
    read: Mapping[Numbers, float | None] | None = None,
) -> Retrieved:
    """What a policy may choose by; raises `InvalidInputError` for scores that are none."""
    given = [chunk.text if isinstance(chunk, StoredChunk) else chunk for chunk in chunks]
    texts = (text if isinstance(text, str) else "" for text in given)
    known = None if scores is None else ranking(scores, len(chunks))
    return Retrieved(question, tuple(texts), known, read or {})


def listed_questions(questions: Iterable[Asked]) -> list[Asked]:
    """The questions of a batch, each with a list of chunks.

    Raises:
        InvalidInputError: If one is no question with its chunks.
    """
    found: list[Any] = []
    for asked in questions:
        if not isinstance(asked, (tuple, list)) or len(asked) not in (2, 3, 4, 5):
            raise InvalidInputError(
                "each question must be (question, chunks), or (question, chunks, history, scores, "
                f"asked), not {asked!r:.80}"
            )
        question, chunks, *more = asked
        found.append((question, listed_chunks(chunks), *more))
    return found


def listed_keys(keys: Iterable[ChunkKey]) -> list[ChunkKey]:
    """Keys as a list.

    Raises:
        InvalidInputError: If they are one key, or something else is among them.
    """
    found: list[Any] = (
        [keys] if isinstance(keys, ChunkKey) else check_list("keys", keys, "ChunkKey")
    )
    wrong = [key for key in found if key is keys or not isinstance(key, ChunkKey)]
    if wrong:
        raise InvalidInputError(f"keys must be a list of ChunkKey, not {wrong[0]!r:.80}")
    return found


@dataclass(frozen=True)
class RequestBuilder:
    """Makes requests: the arguments checked, the chunks addressed, the prompts tokenised and split.

    Attributes:
        renderer: Writes and tokenises prompts.
        prefiller: Knows prefix, spec and store; None for a model that keeps no keys and values.
        window: Context window in tokens.
        longest: That of a full prefill, which may be longer.
        beyond: Why the window is no longer, the end of a sentence; "" if nobody need be told.
        none_below: As `none_below` of `request`, where that says nothing.
        read: What the model said of the chunks of the next request, as far as its policy wanted to
            know.
    """

    renderer: PromptRenderer
    prefiller: Prefiller | None
    window: int
    longest: int
    beyond: str
    none_below: float | None = None
    read: ReadingReport = field(default_factory=ReadingReport)

    def request(
        self,
        question: str,
        chunks: Sequence[ChunkInput] | None = (),
        *,
        policy: ReusePolicy,
        history: Sequence[Message | Mapping[str, Any]] | None = (),
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        overflow: Overflow = "error",
        stop: Sequence[str] = (),
        scores: Sequence[float] | None = None,
        asked: str = "",
        prefix_mismatch: bool = False,
        streaming: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        skip_special_tokens: bool = True,
        none_below: float | None = None,
        **options: Any,
    ) -> Request:
        """Check, tokenise and split a question.

        Args:
            question: Not empty, unless `history` ends with what a tool said.
            chunks: Best first.
            policy: What to reuse.
            history: Earlier turns, oldest first; they stand behind the chunks.
            max_new_tokens: Of the answer.
            overflow: What to do when the chunks do not fit (see `Overflow`).
            stop: Strings before which the answer ends.
            scores: Of each chunk, where they do not stand best first; for "drop_lowest", and for
                policies that ask which is best.
            asked: What is asked, where the question has more in it; "" for the question.
            prefix_mismatch: Noted in the metrics.
            streaming: Whether pieces are handed on as they come.
            tools: That the chat template describes, behind the chunks.  With tools, or without a
                question, "refine" leaves out chunks as "drop_lowest" does: a call of a tool cannot
                be improved round by round, and a policy that answers from few leaves no others to
                improve it by.
            chat_template_kwargs: Values of the chat template's variables, for this question.
            skip_special_tokens: Off, the answer's text has its control tokens, for who reads calls
                of tools out of it.
            none_below: Nats by which a chunk has to make the question likelier; where none does,
                the answer is `NONE_SAYS`.  None for no such condition.
            options: Further arguments of transformers' `generate()`.
        """
        started = time.perf_counter()
        turns = as_messages(history)
        # What a tool said is answered without a question behind it.
        asks = bool(turns) and turns[-1]["role"] == "tool"
        if not isinstance(question, str) or not (question.strip() or asks):
            raise InvalidInputError("the question is empty; ask something")
        arguments = ChatArguments.from_options(tools, chat_template_kwargs)
        if not isinstance(policy, ReusePolicy):
            raise no_policy(policy)
        if overflow not in ("error", "drop_lowest", "refine"):
            raise InvalidInputError(
                f'overflow must be "error", "drop_lowest" or "refine", not {overflow!r}'
            )
        max_new_tokens = checked_new_tokens(max_new_tokens)
        options = checked_generation(options, streaming=streaming)
        window, beyond = self.window, self.beyond
        is_longer = self.longest > window and policy.is_full
        if is_longer:
            window, beyond = self.longest, ""
        given = listed_chunks(chunks)
        read, none_below = self.read, checked_nats(none_below)
        none_below = self.none_below if none_below is None else none_below
        if tools or is_held(options):
            none_below = None  # what is said then has a form that such an answer has not
        retrieved = retrieved_chunks(asked or question, given, scores, read.likelihoods)
        plan = policy.plan(retrieved)
        chooses = plan.others is not None
        if overflow == "refine" and (tools or not question.strip() or chooses):
            overflow = "drop_lowest"
        query = self.renderer.query_ids(question, turns, None, arguments)
        room = window - len(self.renderer.prefix_ids) - max_new_tokens
        too_long = 0
        if chooses and overflow == "drop_lowest":
            context, too_long = self._first_that_fit(given, plan, room - len(query))
        else:
            any_length = is_longer or overflow == "drop_lowest"
            only = plan.order if chooses else None
            context = self.chunks(given, any_length=any_length, only=only)
        # Those that were chosen stand best first now.
        ranks = ranking(None if chooses else retrieved.scores, len(context))
        if sum(map(len, context)) > room - len(query):
            # What a row says of a length is a hint: before anything is left out, its text counts.
            context = list(map(self._measured, context))
        sizes = list(map(len, context))
        later_room = 0
        if overflow == "refine" and sum(sizes) > room - len(query):
            # A later question carries an answer of up to `max_new_tokens` besides its own.
            again = self.renderer.query_ids(question, turns, "", arguments)
            later_room = room - len(again) - max_new_tokens
        rounds = split_rounds(
            sizes,
            room=room - len(query),
            later_room=later_room,
            overflow=overflow,
            scores=ranks,
            beyond=beyond,
        )
        parts = [[context[index] for index in indices] for indices in rounds]
        plans = [_again(policy, plan, retrieved, part) for part in parts]
        return Request(
            question=question,
            query=query,
            history=tuple(turns),
            rounds=tuple(
                tuple(map(part.__getitem__, one.order))
                for part, one in zip(parts, plans, strict=True)
            ),
            fresh=tuple(one.fresh for one in plans),
            dropped_chunks=too_long + len(context) - sum(map(len, rounds)),
            policy=policy,
            max_new_tokens=max_new_tokens,
            stop=(
                *checked_stop(stop),
                *(() if is_held(options) else self.renderer.template.markers),
            ),
            options=options,
            started=started,
            prefix_mismatch=prefix_mismatch,
            arguments=arguments,
            skip_special_tokens=skip_special_tokens,
            # What came by text has its ids.
            references=len(context) - sum(map(bool, map(attrgetter("ids"), context))),
            unused_chunks=len(given) - len(context) - too_long,
            asked=asked or question,
            wants=_wanted(policy, retrieved, none_below),
            read=read,
            none_below=none_below,
            says_none=none_below is not None and read.is_below(none_below, len(given)),
        )

    def completion(
        self,
        prompt: str,
        *,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        stop: Sequence[str] = (),
        streaming: bool = False,
        skip_special_tokens: bool = True,
        none_below: float | None = None,
        **options: Any,
    ) -> Request:
        """Check and tokenise a text that is continued as it is.

        Raises:
            InvalidInputError: If it is empty.
            ContextTooLongError: If it does not fit the context window.
        """
        started = time.perf_counter()
        ids = self.renderer.text_ids(prompt) if isinstance(prompt, str) and prompt else ()
        if not ids:  # some tokenizers have no token for space alone
            raise InvalidInputError("the prompt is empty; write something to continue")
        max_new_tokens = checked_new_tokens(max_new_tokens)
        checked_nats(none_below)  # there are no chunks to say anything
        options = checked_generation(options, streaming=streaming)
        if len(ids) + max_new_tokens > self.longest:
            raise ContextTooLongError(
                f"the prompt has {len(ids)} tokens and the context window is {self.longest}, "
                "of which "
                f"{max_new_tokens} are kept for the answer; shorten it or lower max_new_tokens"
            )
        return Request(
            question=prompt,
            query=ids,
            history=(),
            rounds=((),),
            fresh=(0,),
            dropped_chunks=0,
            policy=FullRecompute(),
            max_new_tokens=max_new_tokens,
            stop=checked_stop(stop),
            options=options,
            started=started,
            skip_special_tokens=skip_special_tokens,
            is_plain=True,
        )

    def chunks(
        self,
        given: Sequence[ChunkInput] | None,
        *,
        any_length: bool = False,
        only: Sequence[int] | None = None,
    ) -> list[ContextChunk]:
        """Check and address chunks.

        Args:
            given: Text, key, or both of each.
            any_length: Whether one that is too long is no error, as it may be left out.
            only: Numbers of those that are addressed, in this order; the others are checked alone.
                None: all.

        Raises:
            InvalidInputError: If they are one text instead of a list, or one cannot be used.
            ContextTooLongError: If one does not fit the context window.
        """
        listed = listed_chunks(given)
        for index, chunk in enumerate(listed if only is not None else ()):
            self._parts(chunk, index)
        wanted = range(len(listed)) if only is None else only
        context = [self.chunk(listed[index], index) for index in wanted]
        room = self.window - len(self.renderer.prefix_ids)
        for one in () if any_length else context:
            if len(one.ids) > room:
                raise ContextTooLongError(_too_long(one.place, len(one.ids), room))
        return context

    def _first_that_fit(
        self,
        given: Sequence[ChunkInput],
        plan: Plan,
        room: int,
    ) -> tuple[list[ContextChunk], int]:
        """As many chunks as were chosen, in place of one that does not fit the next best.

        Returns:
            Those taken, and how many did not fit.

        Raises:
            ContextTooLongError: If none fits.
        """
        taken: list[ContextChunk] = []
        too_long: list[ContextChunk] = []
        for index in (*plan.order, *(plan.others or ())):
            if len(taken) == len(plan.order) or room < 0:
                self._parts(given[index], index)
                continue
            chunk, left = self.chunk(given[index], index), room - sum(map(len, taken))
            if len(chunk) > left:
                chunk = self._measured(chunk)  # what a row says of a length is a hint
            (taken if len(chunk) <= left else too_long).append(chunk)
        if too_long and not taken:
            worst = too_long[0]
            raise ContextTooLongError(_too_long(worst.place, len(worst), room) + self.beyond)
        return taken, len(too_long)

    def needs(self, policy: ReusePolicy, retrieved: Retrieved) -> Numbers:
        """Chunks whose keys and values an answer looks for, by their numbers."""
        if self.none_below is not None:
            return tuple(range(len(retrieved)))
        return policy.needs(retrieved)

    def chunk(self, given: ChunkInput, index: int) -> ContextChunk:
        """Check and address one chunk.

        Args:
            given: Text, key, or both.
            index: Its number, for messages.

        Raises:
            InvalidInputError: If it is empty or of no known type.
            FingerprintMismatchError: If the key belongs to another model, prefix or namespace.
        """
        key, text = self._parts(given, index)
        if key is None:
            return self._from_text(text or "", index)
        if text is None:
            return ContextChunk(key, (), None, place=index)
        outdated = given.outdated if isinstance(given, StoredChunk) else ""
        if outdated or self.mismatch(key):
            return self._from_text(text, index, outdated or "other model")
        if self.prefiller is not None and self.prefiller.store.contains(key):
            return ContextChunk(key, (), text, place=index)
        return self._from_text(text, index, "evicted")

    def _parts(self, given: ChunkInput, index: int) -> tuple[ChunkKey | None, str | None]:
        """Key and text of a chunk, which has one of both at least; nothing is tokenised."""
        key: ChunkKey | None = given if isinstance(given, ChunkKey) else None
        text: str | None = given if isinstance(given, str) else None
        if isinstance(given, StoredChunk):
            key, text = given.key, given.text
        if not isinstance(key, ChunkKey):
            if not isinstance(text, str):
                raise InvalidInputError(
                    f"chunk {index} is a {type(given).__name__}; give a text, ChunkKey or "
                    "StoredChunk"
                )
            if not text.strip():
                raise InvalidInputError(f"chunk {index} is empty; leave it out")
            return None, text
        mismatch = self.mismatch(key) if text is None else ""
        if mismatch:
            raise FingerprintMismatchError(mismatch)
        return key, text

    def _measured(self, chunk: ContextChunk) -> ContextChunk:
        """A chunk with the length that its text has, if that is known."""
        if chunk.ids or chunk.text is None:
            return chunk
        measured = self._from_text(chunk.text, chunk.place)
        return measured if measured.key == chunk.key else replace(measured, why="other text")

    def _from_text(self, text: str, index: int, why: MissReason | Literal[""] = "") -> ContextChunk:
        if not text.strip():
            raise InvalidInputError(f"chunk {index} is empty; leave it out")
        try:
            ids = self.renderer.chunk_ids(text)
        except InvalidInputError as error:
            raise InvalidInputError(f"chunk {index} cannot be used: {error}") from error
        if not ids:  # some tokenizers have none for what cannot be seen
            raise InvalidInputError(f"chunk {index} has no tokens; leave it out")
        if self.prefiller is None:
            unknown = ChunkKey("0" * 64, "0" * 64, "", len(ids), 0)
            return ContextChunk(unknown, ids, text, place=index)
        return ContextChunk(self.prefiller.key(ids), ids, text, place=index, why=why)

    def mismatch(self, key: ChunkKey) -> str:
        """Why a key is not of this engine, or ""."""
        mine = self.prefiller
        if mine is None:
            return "this model keeps no keys and values, so no key belongs to it; pass texts"
        if not re.fullmatch("[0-9a-f]{64}", str(key.digest)):
            return f"{key.digest!r} is not the digest of a chunk; pass the chunk's text"
        if not isinstance(key.tokens, int) or key.tokens < 1:
            return f"chunk {key.digest[:12]} has no {key.tokens!r} tokens; pass the chunk's text"
        expected = (mine.spec, mine.namespace, len(mine.prefix_ids))
        if (key.spec, key.namespace, key.start) == expected:
            return ""
        return (
            f"chunk {key.digest[:12]} was made by another model, dtype, codec, prefix or "
            "namespace; pass its text, or add it again with this engine"
        )


def _again(
    policy: ReusePolicy, plan: Plan, retrieved: Retrieved, chunks: Sequence[ContextChunk]
) -> Plan:
    """The plan of those of the chunks that are in one prompt, by their numbers there."""
    if plan.others is None:
        return policy.plan(retrieved.only([chunk.place for chunk in chunks]))
    # They were chosen, or took the place of one that was: as many are brought.
    return Plan(tuple(range(len(chunks))), max(0, len(chunks) - len(plan.brought)))


def _wanted(
    policy: ReusePolicy, retrieved: Retrieved, none_below: float | None
) -> tuple[Numbers, ...]:
    """What is read before an answer: for its policy, and to see whether any chunk says it."""
    if not len(retrieved):
        return ()
    wanted, numbers = policy.wants(retrieved), range(len(retrieved))
    wrong = [context for context in wanted if not {*context} <= {*numbers}]
    if wrong:
        raise InvalidInputError(
            f"{policy!r} wants {wrong[0]!r} read of {len(retrieved)} chunks; wants() gives tuples "
            "of their numbers"
        )
    if none_below is not None:
        wanted = (*wanted, (), *((one,) for one in retrieved.ranked()))
    return tuple(one for one in dict.fromkeys(wanted) if one not in retrieved.read)


def split_rounds(
    sizes: Sequence[int],
    *,
    room: int,
    later_room: int,
    overflow: Overflow,
    scores: Sequence[float] | None = None,
    beyond: str = "",
) -> list[list[int]]:
    """Which chunks go into which round.

    Args:
        sizes: Tokens of each chunk, best first.
        room: Tokens for chunks beside prefix, query and answer, in the first round.
        later_room: The same in later rounds, whose query carries the answer so far.
        overflow: What to do.
        scores: Of each chunk, higher is better, where the order says nothing; None for best first.
        beyond: Why the context window is no longer, at the end of what is raised.

    Returns:
        Indices of the chunks of each round; at least one round, which may be empty.

    Raises:
        ContextTooLongError: If not even the query fits, or "error" and not everything fits, or one
            chunk alone does not fit.
    """
    if room < 0:
        raise ContextTooLongError(
            f"instruction, history, question and max_new_tokens alone are {-room} tokens over the "
            "model's context window; shorten the question or the history, or lower max_new_tokens"
            f"{beyond}"
        )
    if sum(sizes) <= room:
        return [list(range(len(sizes)))]
    if overflow == "error":
        raise ContextTooLongError(
            f"the chunks have {sum(sizes)} tokens and the context window has room for {room}; "
            'retrieve fewer or smaller chunks, or use overflow="drop_lowest" or "refine"'
            f"{beyond}"
        )
    if overflow == "drop_lowest":
        ranked = sorted(range(len(sizes)), key=lambda i: -scores[i] if scores else i)
        kept = _fitting(sizes, ranked, room)
        if not kept:
            raise ContextTooLongError(_too_long(ranked[0], sizes[ranked[0]], room) + beyond)
        return [kept]
    if later_room < 0:
        raise ContextTooLongError(
            f"a later round, which carries the answer so far, is {-later_room} tokens over the "
            "context window; lower max_new_tokens or retrieve fewer chunks"
            f"{beyond}"
        )
    rounds: list[list[int]] = [[]]
    used, space = 0, room
    for index, size in enumerate(sizes):
        if used + size > space and rounds[-1]:
            rounds.append([])
            used, space = 0, later_room
        if used + size > space:
            raise ContextTooLongError(_too_long(index, size, space) + beyond)
        rounds[-1].append(index)
        used += size
    return rounds


def _too_long(index: int, size: int, room: int) -> str:
    return (
        f"chunk {index} has {size} tokens and the model's context window has room for {room}; "
        "split it into smaller chunks"
    )


def _fitting(sizes: Sequence[int], ranked: Sequence[int], room: int) -> list[int]:
    """The best chunks that fit together, in prompt order."""
    kept, used = [], 0
    for index in ranked:
        if used + sizes[index] > room:
            break
        kept.append(index)
        used += sizes[index]
    return sorted(kept)


def checked_stop(stop: Sequence[str] | str | None) -> tuple[str, ...]:
    """Stop strings as a tuple; raises `InvalidInputError` unless all are texts, none empty."""
    strings = (stop,) if isinstance(stop, str) else stop or ()
    if not isinstance(strings, (list, tuple)) or not all(
        isinstance(text, str) and text for text in strings
    ):
        raise InvalidInputError(f"stop must be a list of texts that are not empty, not {stop!r}")
    return tuple(strings)


def checked_nats(nats: object) -> float | None:
    """A finite number, or None; raises `InvalidInputError` if it is neither."""
    is_number = isinstance(nats, Real) and not isinstance(nats, bool)
    if nats is None or (isinstance(nats, Real) and is_number and math.isfinite(nats)):
        return None if nats is None else float(nats)
    raise InvalidInputError(f"none_below must be a number of nats, not {nats!r}")


def checked_new_tokens(count: object) -> int:
    """A positive number of tokens; raises `InvalidInputError` if it is none."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        raise InvalidInputError(f"max_new_tokens must be a positive number, not {count!r}")
    return int(count)
