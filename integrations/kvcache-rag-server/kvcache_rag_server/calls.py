"""One request as a call of the engine: what is asked, in which form, and what its answer says.

What a request asks means the same as in the integrations: with documents, only the engine's own
instruction can stand before the chunks; without any, it is an ordinary conversation.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.generation.grammar import json_instruction
from kvcache_rag.generation.request import retrieved_chunks
from kvcache_rag.generation.tools import ToolCall, ToolChoice, UnreadableCall, read_whole
from kvcache_rag.integration.chat import ConversationForms
from kvcache_rag.prompt.conversation import instructed, rendered, said
from kvcache_rag_server.backend import Finished, Piece
from kvcache_rag_server.logits import LogprobRecorder, Penalties

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from threading import Event as Flag

    from kvcache_rag.engine import Engine
    from kvcache_rag.generation.question import ChunkInput
    from kvcache_rag.generation.tools import AnswerPart, AnswerReader
    from kvcache_rag.integration.chat import ConversationForm
    from kvcache_rag.metrics import Answer
    from kvcache_rag.prompt.conversation import Turn
    from kvcache_rag_server.backend import BackendRequest, PromptWriter, TokenLogprob

# Options that change nothing where nothing is sampled.
OF_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed", "do_sample"})

# Of logits, by OpenAI's names; the engine knows functions instead.
_OF_LOGITS = ("frequency_penalty", "presence_penalty", "logit_bias")


def grounded(
    prompts: PromptWriter, work: BackendRequest, turns: Sequence[Turn] | None = None
) -> tuple[list[Turn], bool]:
    """Turns that stand behind chunks, and whether an instruction was another one.

    Args:
        prompts: Knows the engine's own instruction.
        work: The request.
        turns: In place of the request's own.
    """
    system = [said("system", text) for text in work.system]
    spoken = work.turns if turns is None else turns
    return instructed([*system, *spoken], prompts.template.system)


def split(turns: Sequence[Turn]) -> tuple[str, tuple[Turn, ...]]:
    """The question that turns end with, "" behind what a tool said, and those before it."""
    if turns and turns[-1]["role"] == "user":
        return turns[-1]["content"], tuple(turns[:-1])
    return "", tuple(turns)


def answered_from(engine: Engine, work: BackendRequest) -> tuple[str, ...]:
    """Chunks of a request that its policy would answer from, as far as it knows before reading."""
    policy = work.policy or engine.policy
    with suppress(InvalidInputError):  # which its answer will tell
        policy, _ = engine._bound.guard.gated(policy, has_chunks=bool(work.chunks))
    found = retrieved_chunks(work.asked, work.chunks, work.scores)
    plan = policy.plan(found)
    is_all = plan.others is None  # in the order in which they were given
    return work.chunks if is_all else tuple(work.chunks[at] for at in plan.order)


def plain_prompt(prompts: PromptWriter, work: BackendRequest) -> str:
    """The text that `Engine.complete` continues: a prompt as it is, a conversation as written.

    Raises:
        InvalidInputError: If the tokenizer's chat template cannot write these messages.
    """
    return rendered(prompts.render_chat, work.turns) if work.is_chat else work.question


def is_sampled(work: BackendRequest) -> bool:
    """Whether chance has a part in its answer."""
    options = work.options
    return bool(options.get("do_sample", options.get("temperature")))


def engine_options(work: BackendRequest) -> dict[str, Any]:
    """Arguments of the engine that say how an answer is generated, but for logits."""
    left_out = {*_OF_LOGITS, *({"seed"} if is_sampled(work) else OF_SAMPLING)}
    options = {name: value for name, value in work.options.items() if name not in left_out}
    return {**options, "max_new_tokens": work.max_new_tokens, "stop": work.stop}


@dataclass(frozen=True)
class EngineCall:
    """A request for an engine.

    Attributes:
        engine: Answers.
        work: The request.
        turns: As the model reads them; none of a text that is continued as it is.
        form: How tools are called; None where there are none.
        is_foreign: Whether an instruction could not stand before the chunks.
        processors: Of grammars.
        chat: Arguments of the chat template.
    """

    engine: Engine
    work: BackendRequest
    turns: Sequence[Turn] = ()
    form: ConversationForm | None = None
    is_foreign: bool = False
    processors: tuple[Any, ...] = ()
    chat: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine, work: BackendRequest) -> EngineCall:
        """Read a request for an engine.

        Raises:
            InvalidInputError: If tools or schema cannot be used.
            MissingExtraError: If the answer is held to JSON and llguidance is not installed.
        """
        if work.is_plain:
            return cls(engine, work)
        turns, is_foreign = work.turns, False
        if work.schema is not None:
            turns = _told(turns, work.schema)
        if not work.is_chat:
            turns, is_foreign = grounded(engine, work, turns)
        if not work.has_calls and work.schema is None:
            return cls(engine, work, turns, is_foreign=is_foreign)
        forms, is_held = ConversationForms.of(engine), work.schema is not None
        processors = () if work.schema is None else (forms.grammars.processor({**work.schema}),)
        if not work.has_calls:
            return cls(engine, work, turns, None, is_foreign, processors)
        form = forms.form(turns, work.tools or ToolChoice(), is_held=is_held)
        processors += tuple(form.options.get("logits_processor") or ())
        return cls(engine, work, form.turns, form, is_foreign, processors, form.chat)

    @property
    def prompt(self) -> str:
        """The conversation as one text; over documents, as if there were none."""
        if self.work.is_plain:
            return self.work.question
        return rendered(self.engine.render_chat, self.turns, **self.chat)

    def answers(
        self, chunks: Sequence[ChunkInput], emit: Callable[[Piece], None] | None, cancelled: Flag
    ) -> Iterator[Finished]:
        """Each answer, one behind the other; what they have in common is computed once.

        Args:
            chunks: Texts or keys of the request's.
            emit: Takes their pieces as they come.
            cancelled: Once set, it stops generation.
        """
        for index in range(self.work.n):
            if index and cancelled.is_set():
                return
            yield self._answer(index, chunks, emit, cancelled)

    def _answer(
        self,
        index: int,
        chunks: Sequence[ChunkInput],
        emit: Callable[[Piece], None] | None,
        cancelled: Flag,
    ) -> Finished:
        recorder = self._recorder()
        reader = self._reader()
        sender = None
        if emit is not None:
            sender = PieceSender(emit, index, reader, recorder, self._choice)
        options = engine_options(self.work)
        options.update(cancelled=cancelled, emit=sender)
        processors = [*filter(None, (recorder, self._penalties())), *self.processors]
        if processors:
            options["logits_processor"] = processors
        if self.form is not None:
            given = self.form.options
            options.update({name: one for name, one in given.items() if name != "logits_processor"})
        written = self._generated(chunks, options)
        answer = cited(self.work, written)
        if sender is not None:
            sender.finish(answer, answer.text[len(written.text) :])
        left: tuple[TokenLogprob, ...] = ()
        if recorder is not None:
            left = recorder.rest(written.token_ids, written.text)
        parts = self._parts(answer, sender)
        return Finished(answer, parts, left)

    def _generated(self, chunks: Sequence[ChunkInput], options: dict[str, Any]) -> Answer:
        work = self.work
        if work.is_plain or work.is_chat:
            return self.engine.complete(self.prompt, **options)
        question, history = split(self.turns)
        return self.engine.generate(
            question,
            chunks,
            policy=work.policy,
            history=history,
            scores=work.scores,
            asked=work.asked,
            prefix_mismatch=self.is_foreign,
            **self.chat,
            **options,
        )

    def _parts(self, answer: Answer, sender: PieceSender | None) -> tuple[AnswerPart, ...] | None:
        if self.form is None:
            return None
        if sender is not None:
            return tuple(sender.parts)
        reader = self._reader()
        if reader is None or answer.metrics.says_none:
            return None
        parts = whole(answer, read_whole(reader, answer.text))
        return tuple(allowed(self._choice, parts))

    @property
    def _choice(self) -> ToolChoice:
        return self.work.tools or ToolChoice()

    def _reader(self) -> AnswerReader | None:
        return None if self.form is None else self.form.reader(lambda: self.prompt)

    def _penalties(self) -> Penalties | None:
        frequency, presence, bias = (self.work.options.get(name) for name in _OF_LOGITS)
        if not (frequency or presence or bias):
            return None
        return Penalties(frequency or 0.0, presence or 0.0, bias or {})

    def _recorder(self) -> LogprobRecorder | None:
        most = self.work.logprobs
        return None if most is None else LogprobRecorder(self.engine.tokenizer, most)


def whole(answer: Answer, parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Parts of an answer without the piece of a call at which it was cut."""
    is_cut = answer.finish_reason != "stop"
    return [part for part in parts if not (is_cut and isinstance(part, UnreadableCall))]


def allowed(choice: ToolChoice, parts: Iterable[AnswerPart], made: int = 0) -> list[AnswerPart]:
    """Parts without calls that nobody allowed, which models make that have seen some.

    Args:
        choice: Tools of the answer.
        parts: Further parts.
        made: Calls before them.
    """
    kept: list[AnswerPart] = []
    for part in parts:
        if isinstance(part, ToolCall):
            if not choice.may_call or (made and not choice.parallel):
                continue
            made += 1
        kept.append(part)
    return kept


def cited(work: BackendRequest, answer: Answer) -> Answer:
    """An answer with the id of its one source behind it, where the app asks for that in its form.

    Where it was cut, says that no document has it, or is no plain text, it stays as it is.
    """
    if work.packed is None or not work.is_simple or answer.finish_reason != "stop":
        return answer
    if answer.metrics.says_none or not answer.text.strip():
        return answer
    places = (work.places[at] for at in answer.metrics.answered_from)
    return replace(answer, text=answer.text + work.packed.citation(places, answer.text))


class PieceSender:
    """Takes an answer apart as it comes, and hands its pieces on.

    Attributes:
        parts: What it was made of so far.
    """

    def __init__(
        self,
        emit: Callable[[Piece], None],
        index: int,
        reader: AnswerReader | None,
        recorder: LogprobRecorder | None,
        choice: ToolChoice,
    ) -> None:
        self._choice = choice
        self.parts: list[AnswerPart] = []
        self._emit, self._index = emit, index
        self._reader, self._recorder = reader, recorder

    def __call__(self, text: str) -> None:
        """A further piece of text."""
        self._send([text] if self._reader is None else self._reader.feed(text))

    def finish(self, answer: Answer, behind: str) -> None:
        """No further text comes, but for what stands `behind` the model's own."""
        if behind:
            self(behind)
        if self._reader is None:
            return
        self._send(whole(answer, self._reader.finish()))
        if answer.metrics.says_none and not self.parts:  # which is not in the model's form
            self._send([answer.text])

    def _send(self, parts: Sequence[AnswerPart]) -> None:
        made = sum(isinstance(part, ToolCall) for part in self.parts)
        for part in allowed(self._choice, parts, made):
            self.parts.append(part)
            told: tuple[TokenLogprob, ...] = ()
            if self._recorder is not None:
                told = self._recorder.new()
            if isinstance(part, str):
                self._emit(Piece(part, index=self._index, logprobs=told))
            else:
                self._emit(Piece("", part, self._index, told))


def prompt_tokens(engine: Engine, work: BackendRequest, chunk_tokens: int) -> int:
    """Tokens of a prompt over chunks of so many; of tools as if they stood by themselves."""
    call = EngineCall.of(engine, work)
    question, history = split(call.turns)
    tokens = chunk_tokens + len(engine.tokenize(question, (), history).all)
    if call.chat.get("tools"):
        tokens += len(engine.brought_ids(json.dumps(call.chat["tools"], ensure_ascii=False)))
    return tokens


def _told(turns: Sequence[Turn], schema: Mapping[str, Any]) -> list[Turn]:
    """Turns of which the last one of the user says in which JSON to answer."""
    if {**schema} in ({}, {"type": "object"}):  # any JSON: the user has said what
        return [*turns]
    last = max((at for at, turn in enumerate(turns) if turn["role"] == "user"), default=None)
    if last is None:
        return [*turns]
    asked = said("user", turns[last]["content"] + json_instruction({**schema}))
    return [*turns[:last], asked, *turns[last + 1 :]]
