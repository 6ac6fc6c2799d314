"""Prompts of a model that another server computes: tokenizer and template, no weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import ContextTooLongError, InvalidInputError
from kvcache_rag.generation.gate import template_digest
from kvcache_rag.policies import FullRecompute, Reuse, ReusePolicy
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag_server.calls import grounded, plain_prompt, split
from vllm_kvcache_rag.transfer.params import TransferParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag.prompt.template import PromptTemplate
    from kvcache_rag_server.backend import BackendRequest


@dataclass(frozen=True)
class WrittenPrompt:
    """A request as token ids.

    Attributes:
        ids: All of the prompt.
        prefix: How many of them stand before the chunks.
        chunks: Ids of each chunk that may be stored.
        params: What is asked of the engine's connector; None where there is nothing to reuse.
        fresh: Tokens of chunks behind those, which are computed with the question.
        policy: Whose answer it is.
        answered_from: Numbers of the chunks as they were given, in prompt order.
        unused: Chunks that were left out.
    """

    ids: tuple[int, ...]
    prefix: int = 0
    chunks: tuple[tuple[int, ...], ...] = ()
    params: TransferParams | None = None
    fresh: int = 0
    policy: ReusePolicy = field(default_factory=FullRecompute)
    answered_from: tuple[int, ...] = ()
    unused: int = 0

    @property
    def context(self) -> int:
        """Tokens of the prefix and the chunks that may be stored."""
        return self.prefix + sum(map(len, self.chunks))

    @property
    def unstitched(self) -> WrittenPrompt:
        """The same for a server that stores nothing; one chunk behind the prefix is exact there."""
        policy = FullRecompute() if isinstance(self.policy, Reuse) else self.policy
        return replace(self, params=None, policy=policy)


class Prompts:
    """Writes requests as an engine of this process would.

    Attributes:
        template: How prompts are written.
        context_window: Longest prompt and answer, in tokens.
    """

    def __init__(self, tokenizer: Any, template: PromptTemplate, window: int) -> None:
        """Bind a tokenizer to a template."""
        self.template, self.context_window = template, window
        self._renderer = PromptRenderer(template, tokenizer)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Messages as one prompt, by the tokenizer's chat template."""
        return self._renderer.render_chat(messages)

    def tokenize_text(self, prompt: str) -> tuple[int, ...]:
        """Ids of a whole prompt."""
        return self._renderer.text_ids(prompt)

    def brought_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a text of users or documents by itself."""
        return self._renderer.brought_ids(text)

    def write(self, work: BackendRequest, chunks: Sequence[str]) -> WrittenPrompt:
        """A request over the texts of its chunks.

        Raises:
            InvalidInputError: If a text, or the policy, cannot be used.
            ContextTooLongError: If prompt and answer do not fit.
        """
        _refuse(work)
        if work.is_plain or work.is_chat:
            written = WrittenPrompt(self.tokenize_text(plain_prompt(self, work)))
        else:
            written = self._grounded(work, chunks)
        whole = len(written.ids) + work.max_new_tokens
        if whole > self.context_window:
            raise ContextTooLongError(
                f"prompt and answer have {whole} tokens and the model's context window is "
                f"{self.context_window}; ask for a shorter answer, or send fewer or smaller "
                "documents"
            )
        return written

    def _grounded(self, work: BackendRequest, chunks: Sequence[str]) -> WrittenPrompt:
        """A question over the chunks that its policy answers from, in the order that it wants."""
        policy = Reuse() if work.policy is None else work.policy
        is_plain = policy.is_reuse and policy.scaling is None and not policy.joint
        if not (is_plain or policy.is_full):
            raise InvalidInputError(
                f"{policy!r} recomputes tokens, which vLLM does not; ask for bestfew, reuse, "
                "composite or full"
            )
        question, history = split(grounded(self, work)[0])
        # Chosen by what the user asks, without what was put before it.
        found = Retrieved(work.asked, tuple(chunks), work.scores)
        if policy.wants(found):
            raise InvalidInputError(
                f"{policy!r} reads the question behind every document, for which vLLM would "
                "compute all of them anew; ask for bestfew"
            )
        plan = policy.plan(found)
        order, kept = plan.order, len(plan.brought)
        renderer = self._renderer.in_namespace(work.namespace)
        ids = renderer.tokenize(question, [chunks[place] for place in order], history)
        stored = ids.chunks[:kept]
        if not chunks:
            policy = FullRecompute()
        params = None
        if stored and not policy.is_full:
            params = TransferParams(len(ids.prefix), tuple(map(len, stored)), policy.positions)
        return WrittenPrompt(
            ids.all,
            len(ids.prefix),
            stored,
            params,
            fresh=sum(map(len, ids.chunks[kept:])),
            policy=policy,
            answered_from=order,
            unused=len(chunks) - len(order),
        )

    @cached_property
    def template_digest(self) -> str:
        """Of how chunks and questions are written."""
        return template_digest(self._renderer)

    def context(self, chunks: Sequence[str], namespace: str) -> WrittenPrompt:
        """Prefix and chunks of a tenant's prompts, without a question.

        Raises:
            InvalidInputError: If a text cannot be used.
            ContextTooLongError: If a chunk does not fit.
        """
        ids = self._renderer.in_namespace(namespace).tokenize("?", chunks, ())
        longest = len(ids.prefix) + max(map(len, ids.chunks), default=0)
        if longest >= self.context_window:
            raise ContextTooLongError(
                f"instruction and one of the documents have {longest} tokens and the model's "
                f"context window is {self.context_window}; split the document"
            )
        return WrittenPrompt(ids.prefix, len(ids.prefix), ids.chunks)


def _refuse(work: BackendRequest) -> None:
    """Refuse what is done by the logits or the chat template of a model in this process."""
    asked = {
        "tools": any(isinstance(turn, dict) for turn in work.history)
        or (work.tools is not None and work.tools.may_call),
        "response_format": work.schema is not None,
        "logprobs": work.logprobs is not None,
        "n": work.n > 1,
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise InvalidInputError(f"vLLM is not told {name}; leave it out")
