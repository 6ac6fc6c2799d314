"""One engine that prefills texts into a store: its settings, work and reports.

Settings and reports are small values: they are sent to processes and to actors, and back.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic import model_validator

from kvcache_rag.errors import InvalidInputError, KVCacheRagError, UnsupportedModelError
from kvcache_rag.settings import LocalSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from kvcache_rag.engine import Engine
    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.stores import ChunkStore, MemoryStore
    from kvcache_rag_server.corpus.texts import Text

# A builder rather waits for a remote than computes for nothing.
REMOTE_OPTIONS: Final[Mapping[str, Any]] = {"timeout": 60.0, "retries": 4, "pause": 0.0}

# Batches after which it is no passing fault any more that the store keeps nothing.
LOST_IN_A_ROW: Final = 3


class BuildSettings(LocalSettings):
    """What decides the keys of chunks, and where they go: a place that all workers see."""

    namespace: str = ""
    """Tenant: other namespaces never see its chunks."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.kv_dir is None:
            raise InvalidInputError("say where the chunks go: kv_dir (--kv-dir DIR or URL)")
        return self

    @property
    def place(self) -> str:
        """The store for people: without credentials."""
        place = str(self.kv_dir)
        if not self.is_remote:
            return place
        from kvcache_rag.stores import RemoteStore

        return RemoteStore(place).url

    def open_store(self, memory: MemoryStore | None = None, **options: Any) -> ChunkStore:
        own = REMOTE_OPTIONS if self.is_remote else {"namespace": self.namespace}
        return super().open_store(memory, **own, **options)

    def open(self, **loaded: Any) -> Engine:
        """Load the model.

        Raises:
            InvalidInputError: If it cannot be loaded.
            UnsupportedModelError: If no question would find its chunks (`Engine.why_useless`).
        """
        from kvcache_rag.stores import MemoryStore

        engine = self.open_engine(
            self.open_store(), MemoryStore(0), namespace=self.namespace, **loaded
        )
        if engine.why_useless:
            raise UnsupportedModelError(
                f"{engine.why_useless}, and stored chunks would be of no use"
            )
        return engine

    def check_store(self) -> None:
        """Find out before any model is loaded whether chunks can be kept.

        Raises:
            InvalidInputError: If the store cannot be written.
            MissingExtraError: If the driver of the store is not installed.
        """
        from kvcache_rag.kv.chunk import ChunkKey
        from kvcache_rag.stores.filesystem import why_unwritable

        store = self.open_store()
        if self.is_remote:
            store.contains(ChunkKey("0" * 64, "0" * 64, self.namespace, 1, 0))
            stats = store.stats()
            if stats.failures:
                raise InvalidInputError(f"the store cannot be reached: {stats.last_failure}")
            return
        if why := why_unwritable(self.place):
            raise InvalidInputError(
                f"the store {self.place} cannot be written ({why}); name a folder that can"
            )


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
    def from_text(cls, text: Text, reason: str) -> Failure:
        """Why `text` is not in the store."""
        return cls(text.index, text.name, reason)


@dataclass(frozen=True)
class BatchReport:
    """What became of the texts of one batch; can be pickled and written as JSON.

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
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> BatchReport:
        """The inverse of `to_json`."""
        failures = tuple(Failure(**failure) for failure in values["failures"])
        return cls(**{**values, "indices": tuple(values["indices"]), "failures": failures})


def _nothing() -> None:
    pass


@dataclass
class _Batch:
    """What is known of some texts.

    Attributes:
        keys: Their keys, with the text that is to be computed for each.
        missing: Those that the store did not hold.
        failures: Texts that cannot be stored.
    """

    keys: dict[ChunkKey, Text] = field(default_factory=dict)
    missing: list[ChunkKey] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class Worker:
    """Looks texts up and prefills what is missing; it can be killed at any moment without harm.

    Attributes:
        engine: What prefills.
    """

    def __init__(self, settings: BuildSettings) -> None:
        """Load the model.

        Raises:
            KVCacheRagError: If model or store cannot be used.
        """
        self.engine: Engine = settings.open()
        self._where = settings.place
        self._lost_in_a_row = 0

    def build(
        self, texts: Sequence[Text], on_missing: Callable[[], None] = _nothing
    ) -> BatchReport:
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
        refused = after.put_failures + after.declined - before.put_failures - before.declined
        lost = self._lost(batch) if refused else set()
        reason = after.last_failure or "the store dropped it"
        batch.failures += [
            Failure.from_text(batch.keys[key], f"was not kept: {reason}") for key in lost
        ]
        failed = {failure.index for failure in batch.failures}
        kept = [key for key, text in batch.keys.items() if text.index not in failed]
        fresh = [key for key in batch.missing if batch.keys[key].index not in failed]
        # Another process may have computed some of them meanwhile.
        prefilled = min(len(fresh), after.puts - before.puts)
        is_useless = self._is_useless(batch, lost, fresh)
        return BatchReport(
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
                batch.failures.append(Failure.from_text(text, str(error).removeprefix("chunk 0 ")))
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
                message = " ".join(str(error).split())[:200]
                reason = f"cannot be prefilled: {type(error).__name__}: {message}"
                batch.failures.append(Failure.from_text(batch.keys[keys[0]], reason))
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
