"""One question, checked and tokenised, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kvcache_rag.chunk import ChunkKey
from kvcache_rag.context import ContextChunk
from kvcache_rag.errors import ContextTooLongError, FingerprintMismatchError, InvalidInputError
from kvcache_rag.models.generate import check_generation
from kvcache_rag.overflow import Overflow, split_rounds
from kvcache_rag.policies import FullRecompute, ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag.prefill import Prefiller
    from kvcache_rag.prompt import PromptRenderer
    from kvcache_rag.template import Message


@dataclass(frozen=True)
class StoredChunk:
    """A chunk given by reference, with its text in case the reference has gone.

    Attributes:
        key: Its address, from `Engine.add` or `Engine.reference`.
        text: Its text.
    """

    key: ChunkKey
    text: str


ChunkInput: TypeAlias = str | ChunkKey | StoredChunk
"""How a caller may name a chunk."""


DEFAULT_NEW_TOKENS = 128


@dataclass(frozen=True)
class Request:
    """A question ready to be answered.

    Attributes:
        question: As the caller wrote it.
        history: Earlier turns.
        rounds: Chunks per prompt; more than one with `overflow="refine"`.
        dropped_chunks: Chunks left out.
        policy: What to reuse.
        max_new_tokens: Of the answer.
        stop: Strings before which the answer ends.
        options: Further arguments of `generate()`.
        prefix_mismatch: Carried into the metrics.
        raw: Ids of a plain completion, which has neither template nor chunks; None for a question.
    """

    question: str
    history: tuple[Message | Mapping[str, str], ...]
    rounds: tuple[tuple[ContextChunk, ...], ...]
    dropped_chunks: int
    policy: ReusePolicy
    max_new_tokens: int
    stop: tuple[str, ...]
    options: dict[str, Any]
    prefix_mismatch: bool = False
    raw: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Planner:
    """Turns texts and keys into chunks, and splits them into prompts that fit.

    Attributes:
        renderer: Tokenises.
        prefiller: Knows prefix, spec and store; None for a model that keeps no keys and values.
        window: Context window in tokens.
    """

    renderer: PromptRenderer
    prefiller: Prefiller | None
    window: int

    def chunk(self, given: ChunkInput, index: int, *, by_reference: bool = True) -> ContextChunk:
        """Check and address one chunk.

        Args:
            given: Text, key, or both.
            index: Its number, for messages.
            by_reference: Whether a key may stand for the text.

        Raises:
            InvalidInputError: If it is empty or of no known type.
            FingerprintMismatchError: If the key belongs to another model, prefix or namespace.
            ContextTooLongError: If it does not fit the context window.
        """
        text = given if isinstance(given, str) else None
        if isinstance(given, StoredChunk):
            text = given.text
        key = given if isinstance(given, ChunkKey) else getattr(given, "key", None)
        if text is None and not isinstance(key, ChunkKey):
            raise InvalidInputError(
                f"chunk {index} is a {type(given).__name__}; give a text, a ChunkKey or a "
                "StoredChunk"
            )
        if isinstance(key, ChunkKey):
            mismatch = self.mismatch(key)
            if mismatch and text is None:
                raise FingerprintMismatchError(mismatch)
            held = by_reference and not mismatch and self._is_held(key)
            if held or text is None:
                return ContextChunk(key, None, text)
        return self._from_text(text or "", index)

    def _from_text(self, text: str, index: int) -> ContextChunk:
        if not text.strip():
            raise InvalidInputError(f"chunk {index} is empty; leave it out")
        ids = self.renderer.chunk_ids(text)
        room = self.window - len(self.renderer.prefix_ids)
        if len(ids) > room:
            raise ContextTooLongError(
                f"chunk {index} has {len(ids)} tokens and the model's context window has "
                f"room for {room}; "
                "split it into smaller chunks"
            )
        if self.prefiller is None:
            return ContextChunk(ChunkKey("0" * 64, "0" * 64, "", len(ids), 0), ids, text)
        return ContextChunk(self.prefiller.key(ids), ids, text)

    def mismatch(self, key: ChunkKey) -> str:
        """Why a key is not of this engine, or ""."""
        mine = self.prefiller
        if mine is None:
            return "this model keeps no keys and values, so no key belongs to it; pass texts"
        expected = (mine.spec, mine.namespace, len(mine.prefix_ids))
        if (key.spec, key.namespace, key.start) == expected:
            return ""
        return (
            f"chunk {key.digest[:12]} was made by another model, dtype, codec, prefix or "
            "namespace; "
            "pass its text, or add it again with this engine"
        )

    def _is_held(self, key: ChunkKey) -> bool:
        return self.prefiller is not None and self.prefiller.store.contains(key)

    def request(
        self,
        question: str,
        chunks: Sequence[ChunkInput] = (),
        *,
        policy: ReusePolicy,
        history: Sequence[Message | Mapping[str, str]] = (),
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        overflow: Overflow = "error",
        stop: Sequence[str] = (),
        prefix_mismatch: bool = False,
        streaming: bool = False,
        by_reference: bool = True,
        **options: Any,
    ) -> Request:
        """Check, tokenise and split a question.

        Args:
            question: Not empty.
            chunks: Best first.
            policy: What to reuse.
            history: Earlier turns, oldest first; they stand behind the chunks.
            max_new_tokens: Of the answer.
            overflow: What to do when the chunks do not fit (see `overflow.Overflow`).
            stop: Strings before which the answer ends.
            prefix_mismatch: Noted in the metrics.
            streaming: Whether pieces are handed on as they come.
            by_reference: Whether keys may stand for texts.
            options: Further arguments of transformers' `generate()`.
        """
        if not isinstance(question, str) or not question.strip():
            raise InvalidInputError("the question is empty; ask something")
        if isinstance(chunks, str):
            raise InvalidInputError("chunks must be a list of texts or keys, not one text")
        if overflow not in ("error", "drop_lowest", "refine"):
            raise InvalidInputError(
                f'overflow must be "error", "drop_lowest" or "refine", not {overflow!r}'
            )
        check_new_tokens(max_new_tokens)
        check_generation(options, streaming=streaming)
        planned = [
            self.chunk(chunk, index, by_reference=by_reference)
            for index, chunk in enumerate(chunks)
        ]
        template = self.renderer.template
        first = len(self.renderer.query_ids(template.ask(question), history))
        later = len(self.renderer.query_ids(template.ask_again(question, ""), history))
        fixed = len(self.renderer.prefix_ids) + max_new_tokens
        split = split_rounds(
            [len(chunk) for chunk in planned],
            room=self.window - fixed - first,
            later_room=self.window - fixed - later - max_new_tokens,
            overflow=overflow,
        )
        return Request(
            question=question,
            history=tuple(history),
            rounds=tuple(tuple(planned[index] for index in one) for one in split),
            dropped_chunks=len(planned) - sum(map(len, split)),
            policy=policy,
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            options=options,
            prefix_mismatch=prefix_mismatch,
        )

    def completion(
        self,
        prompt: str,
        *,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        stop: Sequence[str] = (),
        streaming: bool = False,
        **options: Any,
    ) -> Request:
        """Check and tokenise a text that is continued as it is.

        Raises:
            InvalidInputError: If it is empty.
            ContextTooLongError: If it does not fit the context window.
        """
        if not isinstance(prompt, str) or not prompt:
            raise InvalidInputError("the prompt is empty; write something to continue")
        check_new_tokens(max_new_tokens)
        check_generation(options, streaming=streaming)
        ids = self.renderer.text_ids(prompt)
        if len(ids) + max_new_tokens > self.window:
            raise ContextTooLongError(
                f"the prompt has {len(ids)} tokens and the context window is {self.window}, "
                "of which "
                f"{max_new_tokens} are kept for the answer; shorten it or lower max_new_tokens"
            )
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        return Request(
            prompt, (), ((),), 0, FullRecompute(), max_new_tokens, stops, options, raw=ids
        )


def check_new_tokens(count: int) -> None:
    """Raise `InvalidInputError` unless `count` is a positive number of tokens."""
    if not isinstance(count, int) or count < 1:
        raise InvalidInputError(f"max_new_tokens must be a positive number, not {count!r}")
