"""What is built and where it goes: small values that can be sent to a worker."""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.corpus.texts import NAMED
from kvcache_rag.errors import InvalidInputError, KVCacheRagError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcache_rag.corpus.texts import Text
    from kvcache_rag.engine import Engine
    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.prompt.template import PromptTemplate
    from kvcache_rag.stores import ChunkStore


# Of one call of a remote.  A builder rather waits than computes for nothing.
REMOTE_TIMEOUT, REMOTE_RETRIES = 60.0, 4


@dataclass(frozen=True)
class BuildSettings:
    """What decides the keys of chunks, and where they go.

    Attributes:
        model: Hub id, folder, or "tiny".
        store: A folder that all workers see, or a URL such as `s3://bucket/folder`.
        codec: Form of the chunks: "native", "int8" or "int4".
        namespace: Tenant.
        template: How prompts are written; None for the one the model brings, else the default.
        system_prompt: Instruction, instead of the template's own; None for that.
        dtype: "auto" for the checkpoint's own.
        revision: Commit, branch or tag of a model on the hub; None for its default.
        device: Where workers put the model; None for CUDA if there is one.
    """

    model: str
    store: str
    codec: str = "native"
    namespace: str = ""
    template: PromptTemplate | None = None
    system_prompt: str | None = None
    dtype: str = "auto"
    revision: str | None = None
    device: str | None = None

    @property
    def is_remote(self) -> bool:
        """Whether the store is a URL."""
        return "://" in self.store

    @property
    def place(self) -> str:
        """The store for people: without credentials."""
        from kvcache_rag.stores import RemoteStore

        return RemoteStore(self.store).url if self.is_remote else self.store

    def prompt_template(self, brought: PromptTemplate | None) -> PromptTemplate:
        """How prompts are written by a model that brings `brought`."""
        from kvcache_rag.prompt.template import PromptTemplate

        template = self.template or brought or PromptTemplate()
        if self.system_prompt is None:
            return template
        return replace(template, system=self.system_prompt)

    def open_store(self) -> ChunkStore:
        """The store.

        Raises:
            InvalidInputError: If it cannot be a store, or there is no such codec.
            MissingExtraError: If the driver of the URL is not installed.
        """
        from kvcache_rag.codecs import by_name
        from kvcache_rag.stores import DiskStore, RemoteStore

        codec = by_name(self.codec)
        if not self.is_remote:
            return DiskStore(self.store, namespace=self.namespace, codec=codec)
        return RemoteStore(
            self.store, codec=codec, timeout=REMOTE_TIMEOUT, retries=REMOTE_RETRIES, pause=0.0
        )

    def open_engine(self) -> Engine:
        """Load the model.

        Raises:
            InvalidInputError: If it cannot be loaded.
            UnsupportedModelError: If it keeps no keys and values per token.
        """
        from kvcache_rag.engine import Engine
        from kvcache_rag.models.pretrained import load
        from kvcache_rag.stores import MemoryStore

        store = self.open_store()
        options = {"revision": self.revision} if self.revision else {}
        model, tokenizer, brought = load(
            self.model, dtype=self.dtype, device=self.device, options=options
        )
        template = self.prompt_template(brought)
        engine = Engine(
            model,
            tokenizer,
            store=store,
            combinations=MemoryStore(0),
            template=template,
            namespace=self.namespace,
        )
        _ = engine.spec  # raises where nothing can be kept
        return engine

    def check(self) -> None:
        """Find out before any model is loaded what can be known by then.

        Raises:
            InvalidInputError: If the store cannot be written.
            MissingExtraError: If the driver of the store is not installed.
        """
        from kvcache_rag.kv.chunk import ChunkKey

        store = self.open_store()
        if self.is_remote:
            store.contains(ChunkKey("0" * 64, "0" * 64, self.namespace, 1, 0))
            found = store.stats()
            if found.failures:
                raise InvalidInputError(f"the store cannot be reached: {found.last_failure}")
            return
        try:
            with tempfile.TemporaryFile(dir=os.path.abspath(self.store)):
                pass
        except OSError as error:
            raise InvalidInputError(
                f"the store {self.store} cannot be written ({error.strerror}); name a folder that "
                "can"
            ) from error


# What became of texts: of a few, as a worker says, and of all.


@dataclass(frozen=True)
class Failure:
    """A text that is not in the store.

    Attributes:
        index: Number of the text.
        name: Where it stands.
        reason: Why, as the rest of a sentence.
    """

    index: int
    name: str
    reason: str

    @classmethod
    def of(cls, text: Text, reason: str) -> Failure:
        """Why `text` is not in the store."""
        return cls(text.index, text.name, reason)


@dataclass(frozen=True)
class Report:
    """What became of the texts of one task; can be pickled and written as JSON.

    Attributes:
        indices: Numbers of the texts that need no more work, failures included.
        prefilled: Chunks that were computed and stored.
        there: Chunks that the store held already.
        tokens: Tokens of all of them, prefix not counted.
        prefilled_tokens: Tokens of those that were computed.
        nbytes: Bytes written to the store.
        failures: Texts that are not in the store.
        spec: Digest of what the chunks depend on.
        refusal: Why the whole build makes no sense, "" if it does.
    """

    indices: tuple[int, ...] = ()
    prefilled: int = 0
    there: int = 0
    tokens: int = 0
    prefilled_tokens: int = 0
    nbytes: int = 0
    failures: tuple[Failure, ...] = ()
    spec: str = ""
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        """The inverse of `to_json`."""
        failures = tuple(Failure(**one) for one in values["failures"])
        return cls(**{**values, "indices": tuple(values["indices"]), "failures": failures})


@dataclass
class Tally:
    """The sum of all reports.

    Attributes:
        prefilled: Chunks that were computed and stored.
        there: Chunks that the store held already.
        failed: Texts that are not in the store.
        tokens: Tokens of all chunks, prefix not counted.
        prefilled_tokens: Tokens of those that were computed.
        nbytes: Bytes written to the store.
        spec: Digest of what the chunks depend on; "" while unknown.
        failures: The first `NAMED` failures.
        started: `time.perf_counter()` when the build began.
    """

    prefilled: int = 0
    there: int = 0
    failed: int = 0
    tokens: int = 0
    prefilled_tokens: int = 0
    nbytes: int = 0
    spec: str = ""
    failures: list[Failure] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def add(self, report: Report) -> None:
        """Count a report."""
        for name in ("prefilled", "there", "tokens", "prefilled_tokens", "nbytes"):
            setattr(self, name, getattr(self, name) + getattr(report, name))
        self.spec = report.spec or self.spec
        self.failed += len(report.failures)
        self.failures += report.failures[: NAMED - len(self.failures)]

    @property
    def done(self) -> int:
        """Texts that need no more work."""
        return self.prefilled + self.there + self.failed

    @property
    def seconds(self) -> float:
        """Since the build began."""
        return time.perf_counter() - self.started

    @property
    def tokens_per_second(self) -> float:
        """Tokens computed per second of the whole build; 0 when none were."""
        return self.prefilled_tokens / self.seconds if self.prefilled_tokens else 0.0


# What workers are given, and what becomes of the texts of one that died.


DEATHS_OF_A_TEXT: Final = 2  # alone with its worker, before it is left out


@dataclass(frozen=True)
class Task:
    """Texts for one worker.

    Attributes:
        texts: The texts.
        deaths: Workers that died of them.
    """

    texts: tuple[Text, ...]
    deaths: int = 0


class Tasks:
    """What is to be handed out: first what came back, then what is read."""

    def __init__(self, batches: Iterator[Sequence[Text]]) -> None:
        self._batches = batches
        self._again: deque[Task] = deque()
        self.is_read = False

    def next(self) -> Task | None:
        """The next task, None when there is none now."""
        if self._again:
            return self._again.popleft()
        if not self.is_read:
            for texts in self._batches:
                return Task(tuple(texts))
            self.is_read = True
        return None

    @property
    def are_done(self) -> bool:
        """Whether there will be none, unless one comes back."""
        return self.is_read and not self._again

    def give_back(self, task: Task, cause: str) -> Report | None:
        """Take the task of a worker that died; a report where that was the last attempt."""
        if len(task.texts) > 1:
            self._again += [Task((text,)) for text in task.texts]
            return None
        deaths = task.deaths + 1
        if deaths < DEATHS_OF_A_TEXT:
            self._again.append(replace(task, deaths=deaths))
            return None
        (text,) = task.texts
        failure = Failure.of(text, f"was left out: its worker died {deaths} times ({cause})")
        return Report(indices=(text.index,), failures=(failure,))


# One engine that looks texts up and prefills what is missing.


LOST_IN_A_ROW = 3
"""Tasks after which it is no passing fault any more that the store keeps nothing."""


def _nothing() -> None:
    pass


@dataclass
class _Batch:
    """What is known of the texts of one task.

    Attributes:
        keys: Their keys, with the text that is to be computed for each.
        missing: Those that the store did not hold.
        failures: Texts that cannot be stored.
    """

    keys: dict[ChunkKey, Text] = field(default_factory=dict)
    missing: list[ChunkKey] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class Worker:
    """Builds texts, some at a time; it can be killed at any moment without harm.

    Attributes:
        engine: What prefills.
    """

    def __init__(self, settings: BuildSettings) -> None:
        """Load the model.

        Raises:
            KVCacheRagError: If model or store cannot be used.
        """
        self.engine: Engine = settings.open_engine()
        self._where = settings.place
        self._lost_in_a_row = 0

    def build(self, texts: Sequence[Text], on_missing: Callable[[], None] = _nothing) -> Report:
        """Look texts up and prefill what is missing; each is tokenised once to be looked up.

        Args:
            texts: Different texts.
            on_missing: Called once before anything is computed.
        """
        batch = self._looked_up(texts)
        before = self.engine.store.stats()
        if batch.missing:
            on_missing()
            self._fill(batch, batch.missing)
        after = self.engine.store.stats()
        lost = self._lost(batch) if after.put_failures > before.put_failures else set()
        reason = after.last_failure or "the store dropped it"
        batch.failures += [Failure.of(batch.keys[key], f"was not kept: {reason}") for key in lost]
        failed = {failure.index for failure in batch.failures}
        kept = [key for key, text in batch.keys.items() if text.index not in failed]
        fresh = [key for key in batch.missing if batch.keys[key].index not in failed]
        # Another process may have computed some of them meanwhile.
        prefilled = min(len(fresh), after.puts - before.puts)
        is_useless = self._is_useless(batch, lost, fresh)
        return Report(
            indices=tuple(text.index for text in texts),
            prefilled=prefilled,
            there=len(texts) - len(failed) - prefilled,
            tokens=sum(key.tokens for key in kept),
            prefilled_tokens=sum(key.tokens for key in fresh),
            nbytes=sum(after.bytes_written.values()) - sum(before.bytes_written.values()),
            failures=tuple(batch.failures),
            spec=self.engine.spec,
            refusal=f"nothing can be stored in {self._where}: {reason}" if is_useless else "",
        )

    def _is_useless(self, batch: _Batch, lost: set[ChunkKey], fresh: Sequence[ChunkKey]) -> bool:
        """Whether the store keeps nothing at all; one failure may pass, as a remote's timeout."""
        if fresh:
            self._lost_in_a_row = 0
        if fresh or not lost:
            return False
        self._lost_in_a_row += 1
        is_new = len(lost) > 1 and len(batch.keys) == len(batch.missing)
        return is_new or self._lost_in_a_row >= LOST_IN_A_ROW

    def _looked_up(self, texts: Sequence[Text]) -> _Batch:
        batch = _Batch()
        for text in texts:
            try:
                (key,) = self.engine.keys([text.text])
            except KVCacheRagError as error:  # too long, or not for this tokenizer
                batch.failures.append(Failure.of(text, str(error).removeprefix("chunk 0 ")))
                continue
            if key in batch.keys:
                continue  # other characters, the same tokens
            batch.keys[key] = text
            if not self.engine.store.contains(key):
                batch.missing.append(key)
        return batch

    def _fill(self, batch: _Batch, keys: Sequence[ChunkKey]) -> None:
        """Prefill chunks together; where that fails, alone, so that one harms no other."""
        try:
            self.engine.add([batch.keys[key].text for key in keys])
        except Exception as error:  # whatever model and device raise for one text
            if len(keys) == 1:
                said = " ".join(str(error).split())[:200]
                reason = f"cannot be prefilled: {type(error).__name__}: {said}"
                batch.failures.append(Failure.of(batch.keys[keys[0]], reason))
                return
            for key in keys:
                self._fill(batch, [key])

    def _lost(self, batch: _Batch) -> set[ChunkKey]:
        failed = {failure.index for failure in batch.failures}
        store = self.engine.store
        return {
            key
            for key in batch.missing
            if batch.keys[key].index not in failed and not store.contains(key)
        }
