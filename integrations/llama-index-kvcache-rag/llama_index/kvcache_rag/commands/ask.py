"""`kvcache-rag ask "question"`: answer from what was ingested, reusing the KV of its chunks.

As `KVCacheQueryEngine` answers, without LlamaIndex, whose import would take a fifth of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache_rag.commands.options import add_json, as_json
from kvcache_rag.progress import without_controls
from llama_index.kvcache_rag.commands.corpus import (
    Chosen,
    add_answering,
    add_place,
    embedding,
    minilm,
    nothing_in,
)
from llama_index.kvcache_rag.commands.report import (
    cost_line,
    far_line,
    figures,
    is_near,
    likely,
    sooner_line,
    source_lines,
    sources,
)

if TYPE_CHECKING:
    import argparse

    from typing_extensions import Self

    from kvcache_rag import Engine
    from kvcache_rag.generation import AnswerStream
    from kvcache_rag.integration.question import Source, SourcedQuestion
    from kvcache_rag.integration.rows import Row

HELP = "answer a question from the ingested files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the question and how to answer it."""
    parser.add_argument("question")
    add_place(parser)
    add_answering(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer as it comes, where it came from, and what it cost; 0 if there was one."""
    from kvcache_rag import InvalidInputError

    question = arguments.question
    if not question.strip():
        raise InvalidInputError("the question is empty; ask something")
    chosen = Chosen.from_arguments(arguments)
    engine = _engine(chosen)
    found = Retrieved.nearest(chosen, engine, question, arguments.top_k)
    asked = found.asked(engine, question)
    options = {"max_new_tokens": arguments.max_new_tokens, "policy": chosen.policy}
    answer = _printed(asked.stream(engine, options), is_silent=arguments.json)
    metrics = asked.cost(answer.metrics)
    # Behind the answer, so that its first token waits for nothing.
    is_read = likely(chosen.settings.model) is not None
    relevance = found.relevance(engine, question) if is_read else []
    shown = sources(found.shown, metrics, relevance)
    near = is_near(shown, chosen.settings)
    cost = figures(metrics, chosen.settings, max(one["score"] for one in shown))
    if arguments.json:
        said = {
            "question": question,
            "answer": answer.text,
            "near": near,
            "model": chosen.settings.described,
            "policy": metrics["policy"],
            "metrics": cost,
            "sources": shown,
        }
        print(as_json(said))
        return 0
    print("\n")
    if near is False:
        print(far_line(shown, chosen.settings))
    print("\n".join(source_lines(shown)))
    print(cost_line(cost))
    if not chosen.is_other and (line := sooner_line(cost, chosen.settings)):
        print(line)
    return 0


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves."""
    return "what was ingested is as it was"


def _engine(chosen: Chosen) -> Engine:
    from kvcache_rag.integration.engine import open_engine
    from kvcache_rag.policies.policy_registry import given_policy

    how, policy = chosen.settings.of_llm, given_policy(chosen.policy)
    auxiliary = None if policy is None else policy.auxiliary
    engine = open_engine(how.pop("model_name"), policy=policy, auxiliary=auxiliary, **how)
    chosen.check(engine)
    return engine


def _printed(stream: AnswerStream, *, is_silent: bool) -> Any:
    with stream:
        for piece in stream:
            if not is_silent:
                print(without_controls(piece), end="", flush=True)
    return stream.answer


@dataclass(frozen=True)
class Retrieved:
    """The rows of a collection that are nearest to a question.

    Attributes:
        sources: Texts as they stand in prompts.
        shown: File, score and text of each.
    """

    sources: tuple[Source, ...]
    shown: tuple[dict[str, Any], ...]

    @classmethod
    def nearest(cls, chosen: Chosen, engine: Engine, question: str, count: int) -> Self:
        """Search.

        Args:
            chosen: Collection and embedding.
            engine: Whose chunks they are.
            question: The question.
            count: How many rows.

        Raises:
            InvalidInputError: If there are none.
        """
        from kvcache_rag.integration import Reference, Rows
        from kvcache_rag.integration.question import Source
        from kvcache_rag.integration.rows import row_text

        vector = query_vector(chosen.settings.embed, question)
        rows = Rows(chosen.collection).nearest(vector, count)
        if not rows:  # emptied since it was opened
            raise nothing_in(chosen.settings.collection)
        text_of = row_text("", engine.template)
        return cls(
            tuple(
                Source(
                    text_of(row), row.id, _score(row), place, Reference.from_metadata(row.metadata)
                )
                for place, row in enumerate(rows)
            ),
            tuple({"file": _file(row), "score": _score(row), "text": row.document} for row in rows),
        )

    def asked(self, engine: Engine, question: str) -> SourcedQuestion:
        """The question over them; if they do not fit one prompt, in several rounds."""
        from kvcache_rag.integration.question import SourcedQuestion, as_chunks

        chunks, scores = as_chunks([self.sources])
        return SourcedQuestion.over(
            question,
            chunks,
            [one.chunk(engine) for one in chunks],
            prefix_mismatch=False,
            scores=scores,
            overflow="refine",
        )

    def relevance(self, engine: Engine, question: str) -> list[float | None]:
        """How much likelier each makes the question, in nats.

        Empty if one of them does not fit the context window, as an answer may be from the others.
        """
        from kvcache_rag.errors import ContextTooLongError
        from kvcache_rag.integration.ranking import ranked

        texts = [one.text for one in self.sources]
        try:
            numbers = dict(
                ranked(engine, question, texts, lambda at: self.sources[at].chunk(engine))
            )
        except ContextTooLongError:
            return []
        return [numbers[at] for at in range(len(texts))]


def query_vector(embed: str, question: str) -> list[float]:
    """A question's vector, by the name of an embedding on the command line.

    Raises:
        InvalidInputError: If it is not installed or cannot be loaded.
    """
    if embed == "hash":
        from kvcache_rag.integration import hash_vector

        return hash_vector(question)
    if embed == "minilm":
        return minilm().vectors([question])[0]
    found: list[float] = embedding(embed).get_query_embedding(question)
    return found


def _score(row: Row) -> float:
    """A row's similarity, as LlamaIndex's Chroma store has it."""
    return math.exp(-row.distance)


def _file(row: Row) -> str:
    names = (row.metadata.get(name) for name in ("file_path", "ref_doc_id"))
    # LlamaIndex writes the word None where there is no document.
    return next((str(name) for name in names if name not in (None, "", "None")), row.id)
