"""A planned question, and the parts that answer it with the current weights and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from kvcache_rag.errors import InvalidInputError, refuse
from kvcache_rag.generation.joint import Combinations
from kvcache_rag.generation.reading import ChunkReader, ReadingTask, fits, too_long
from kvcache_rag.policies.checks import why_not
from kvcache_rag.policies.policy_registry import given_policy
from kvcache_rag.prefill import Prefiller
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag.stitching.loader import ContextLoader

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from kvcache_rag.generation.policy_guard import PolicyGuard
    from kvcache_rag.generation.question import ChunkInput, Question
    from kvcache_rag.generation.request import Request, RequestBuilder
    from kvcache_rag.generation.runner import Runner
    from kvcache_rag.models.language import LanguageModel
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.stores import ChunkStore


@dataclass(frozen=True)
class Planned:
    """A question ready to be answered.

    Attributes:
        request: With the chunks as the policy wants them.
        asked: The same with the chunks as the caller named them, one by one.
        question: It.
    """

    request: Request
    asked: Request
    question: Question


@dataclass(frozen=True, eq=False)
class Bound:
    """A model, a template and stores for one tenant, replaced as a whole when one of them changes.

    Attributes:
        runner: Answers requests; whoever uses it holds the model.
        request_builder: Makes them.
        tokenizer: As the app has it, which may change it.
        joint: Turns chunks into combinations; None for a model that keeps no keys and values.
        guard: Decides about policies.
        weights: What chunks are addressed by; None for a model that keeps no keys and values.
    """

    runner: Runner
    request_builder: RequestBuilder
    tokenizer: Any
    joint: Combinations | None
    guard: PolicyGuard
    weights: Mapping[str, Any] | None

    @classmethod
    def from_parts(
        cls, runner: Runner, request_builder: RequestBuilder, tokenizer: Any, guard: PolicyGuard
    ) -> Self:
        """Bind a runner and a request builder of the same renderer to each other."""
        loader, joint = runner.loader, None
        if loader is not None and loader.combinations is not None:
            joint = Combinations(loader, loader.combinations, request_builder.window)
        request_builder = replace(request_builder, prefiller=runner.prefiller)
        weights = None if loader is None else runner.model.weights.identity
        return cls(runner, request_builder, tokenizer, joint, guard, weights)

    @property
    def model(self) -> LanguageModel:
        """What computes."""
        return self.runner.model

    @property
    def renderer(self) -> PromptRenderer:
        """Writes and tokenises prompts."""
        return self.request_builder.renderer

    @property
    def prefiller(self) -> Prefiller | None:
        """Computes chunks; None for a model that keeps no keys and values."""
        return self.request_builder.prefiller

    @property
    def capturing(self) -> Prefiller:
        """Likewise.

        Raises:
            UnsupportedModelError: If the model keeps none, with the layer and the reason.
        """
        if self.prefiller is None:
            _ = self.model.measured  # which says why
            raise InvalidInputError("this model keeps no keys and values")
        return self.prefiller

    @property
    def combining(self) -> Combinations:
        """Turns chunks into combinations; raises as `capturing`."""
        _ = self.capturing
        return cast("Combinations", self.joint)

    # ------------------------------------------------------------------ what changes

    @property
    def is_current(self) -> bool:
        """Whether weights and tokenizer are still those of this."""
        weights = self.model.weights
        return self.renderer.is_current and (
            self.weights is None or (weights.are_unchanged() and weights.identity is self.weights)
        )

    def followed(self, app_model: Any) -> Bound:
        """This, or what takes its place; for whoever holds the model.

        Args:
            app_model: As transformers or PEFT has it.
        """
        renderer = self.renderer
        if not renderer.is_current:
            renderer = PromptRenderer(renderer.template, self.tokenizer)
            renderer = renderer.in_namespace(self.renderer.namespace)
        weights = None if self.weights is None else self.model.weights.follow()
        if renderer is self.renderer and weights is self.weights:
            return self
        old = self.runner
        loader = old.loader
        if loader is not None:
            joint = loader.combinations
            together = None if joint is None else joint.prefiller.store
            loader = loader_of(self.model, loader.prefiller.store, together, renderer)
        runner = old.over(renderer, loader, old.auxiliary)
        guard = self.guard.rebound(app_model, runner.prefiller, renderer)
        request_builder = replace(self.request_builder, renderer=renderer)
        return Bound.from_parts(runner, request_builder, self.tokenizer, guard)

    def in_namespace(self, namespace: str, auxiliary: Scorer | None) -> Bound:
        """For another tenant: the same model, stores and settings, other chunks."""
        renderer, loader = self.renderer.in_namespace(namespace), self.runner.loader
        if loader is not None:
            joint = loader.combinations and _moved(loader.combinations, renderer)
            loader = replace(_moved(loader, renderer), combinations=joint)
        runner = self.runner.over(renderer, loader, auxiliary)
        request_builder = replace(self.request_builder, renderer=renderer)
        return Bound.from_parts(runner, request_builder, self.tokenizer, self.guard)

    # ------------------------------------------------------------------ what is asked

    @cached_property
    def reader(self) -> ChunkReader:
        """Reads questions behind single chunks; whoever uses it holds the model."""
        return ChunkReader(self.runner)

    def read(
        self, planned: Sequence[Planned], cancelled: threading.Event | None = None
    ) -> list[Planned]:
        """The same, planned again by what their policies want the model to read before.

        For whoever holds the model.

        Raises:
            StoppedError: If it was cancelled.
        """
        return self._alike([self._planned_by_reading(one, cancelled) for one in planned])

    def _planned_by_reading(self, planned: Planned, cancelled: threading.Event | None) -> Planned:
        question, started = planned.question, planned.request.started
        if not planned.request.wants:
            return planned
        for chunks, fresh in zip(planned.request.rounds, planned.request.fresh, strict=True):
            refuse(why_not(planned.request.policy, self.guard.abilities, len(chunks) - fresh))
        while planned.request.wants:
            read = self.reader.further(planned.request, self._readable(planned), cancelled)
            planned = self._planned(replace(question, read=read))
        request = replace(planned.request, started=started)
        return replace(planned, request=request, asked=replace(planned.asked, started=started))

    def _readable(self, planned: Planned) -> ReadingTask | None:
        """What a request is read by; None if nobody says what is asked."""
        request = planned.request
        turns = (turn["content"] for turn in reversed(request.history) if turn["role"] == "user")
        asked = request.asked.strip() or next(turns, "").strip()
        if not asked:
            return None
        chunks = self.request_builder.chunks(planned.question.chunks, any_length=True)
        try:
            return ReadingTask(self.renderer.asked_ids(asked), tuple(chunks))
        except InvalidInputError:  # it has no token of its own
            return None

    def to_read(self, question: str, chunks: Sequence[ChunkInput]) -> ReadingTask:
        """Check, tokenise and address a question and the chunks that it is read behind.

        Raises:
            InvalidInputError: If one cannot be used.
            ContextTooLongError: If a chunk and the question do not fit the context window.
        """
        if not isinstance(question, str):
            raise InvalidInputError(f"the question must be a text, not {question!r:.80}")
        asked = self.renderer.asked_ids(question)
        found = ReadingTask(asked, tuple(self.request_builder.chunks(chunks, any_length=True)))
        for context in ([], *([chunk] for chunk in found.chunks)):
            if not fits(context, asked, self.renderer, self.request_builder.window):
                raise too_long(context, asked)
        return found

    def plan(self, questions: Sequence[Question]) -> list[Planned]:
        """Check, tokenise and address questions that are answered together.

        Raises:
            InvalidInputError: If an argument cannot be used.
            ContextTooLongError: If a prompt does not fit and `overflow` is "error".
            ChunkNotFoundError: If only the key of a chunk is known and the store has lost it.
        """
        planned = list(map(self._planned, questions))
        return self._alike(planned)

    def _alike(self, planned: list[Planned]) -> list[Planned]:
        """The same under one policy."""
        if not self.guard.refusal:
            return planned
        # They are answered under one policy, and one full prefill makes the others full.
        if not any(one.request.policy.is_full for one in planned):
            return planned
        return [replace(one, request=one.request.by_full_prefill()) for one in planned]

    def plan_answers(self, questions: Sequence[Question]) -> list[Planned]:
        """Likewise, with a warning the first time that a policy may cost answers."""
        planned = self.plan(questions)
        for one in planned:
            self.guard.warn_of_loss(one.request)
        return planned

    def _planned(self, question: Question) -> Planned:
        if question.is_completion:
            request = self.request_builder.completion(question.text, **question.options)
            return Planned(request, request, question)
        wanted = given_policy(question.options.get("policy")) or self.guard.policy
        policy, note = self.guard.gated(wanted, has_chunks=bool(question.chunks))
        options = {**question.options, "policy": policy}
        request_builder = replace(self.request_builder, read=question.read)
        asked = request_builder.request(question.text, question.chunks, **options)
        asked = self.guard.admitted(replace(asked, gate=note))
        if self.joint is None or not asked.policy.joint:
            return Planned(asked, asked, question)
        return Planned(self.joint.arranged(asked), asked, question)


def loader_of(
    model: LanguageModel,
    store: ChunkStore,
    combinations: ChunkStore | None,
    renderer: PromptRenderer,
) -> ContextLoader | None:
    """What brings chunks of a tenant; None for a model that keeps no keys and values.

    Args:
        model: The model.
        store: Of chunks.
        combinations: Of chunks that were computed together; None for none.
        renderer: Of the tenant.
    """
    prefiller = Prefiller.from_model(model, store, renderer.prefix_ids, renderer.namespace)
    if prefiller is None:
        return None
    joint = None if combinations is None else loader_of(model, combinations, None, renderer)
    return ContextLoader(prefiller, renderer, joint)


def _moved(loader: ContextLoader, renderer: PromptRenderer) -> ContextLoader:
    """A loader of the same store for another tenant."""
    prefiller = loader.prefiller.in_namespace(renderer.namespace)
    return replace(loader, prefiller=prefiller, renderer=renderer)
