"""One engine that looks texts up and prefills what is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache_rag.building.report import Failure, Report
from kvcache_rag.errors import KVCacheRagError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.building.corpus import Text
    from kvcache_rag.building.settings import BuildSettings
    from kvcache_rag.chunk import ChunkKey
    from kvcache_rag.engine import Engine


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
