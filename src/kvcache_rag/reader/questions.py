"""Ask questions about a context: which facts answer them, and which cannot be answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_rag.reader.language import ENTITY_TYPES, REFUSAL, RELATIONS, Relation, relations_of

if TYPE_CHECKING:
    from kvcache_rag.reader.contexts import Context, Fact, World


@dataclass(frozen=True)
class ReaderQuestion:
    """A question about the documents of a `ReaderExample`.

    Attributes:
        text: The question.
        answer: The exact answer; "bridge; final" for two hops, "A, B" for several values,
            "not found" if the documents do not say.
        kind: One of `kvcache_rag.reader.KINDS`.
        documents: Indices of the documents that state the facts; empty for a refusal.
    """

    text: str
    answer: str
    kind: str
    documents: tuple[int, ...]


_Key = tuple[str, str]  # entity, name of the relation


class Asker:
    """Draws questions about one context; no question twice."""

    def __init__(self, world: World, context: Context) -> None:
        self._world = world
        self._rng = world.rng
        self._relations = {relation.name: relation for relation in RELATIONS}
        self._values: dict[_Key, list[str]] = {}
        self._documents: dict[_Key, list[int]] = {}
        self._types: dict[str, str] = {}
        for index, document in enumerate(context):
            for fact in document:
                key = (fact.entity, fact.relation.name)
                values = self._values.setdefault(key, [])
                if fact.value not in values:
                    values.append(fact.value)
                self._documents.setdefault(key, []).append(index)
                self._types[fact.entity] = fact.relation.subject
                if fact.relation.value in ENTITY_TYPES:
                    self._types.setdefault(fact.value, fact.relation.value)
        self._stated = sorted({name for _, name in self._values})
        self._single = [key for key in self._values if not self._relations[key[1]].many]
        self._several = [key for key in self._values if self._relations[key[1]].many]
        self._shared = [key for key in self._single if self._is_shared(key[1], len(context))]
        self._chains = self._find_chains()
        self._asked: set[str] = set()

    def about(self, fact: Fact, kind: str) -> ReaderQuestion:
        """Return the question about one fact of the context."""
        return self._question((fact.entity, fact.relation.name), kind)

    def ask(self, kind: str) -> ReaderQuestion | None:
        """Return a new question of `kind`, or None if none was found.

        Raises:
            ValueError: If `kind` is unknown.
        """
        draw = {
            "single": self._ask_single,
            "same_relation": self._ask_shared,
            "unanswerable": self._ask_unanswerable,
            "two_hop": self._ask_two_hop,
            "two_hop_direct": self._ask_two_hop_directly,
            "multi_value": self._ask_several,
        }.get(kind)
        if draw is None:
            raise ValueError(f"unknown kind of question {kind!r}")
        question = draw()
        if question is None or question.text in self._asked:
            return None
        self._asked.add(question.text)
        return question

    def _is_shared(self, relation: str, documents: int) -> bool:
        stating = {self._documents[key][0] for key in self._values if key[1] == relation}
        return len(stating) == documents

    def _find_chains(self) -> list[tuple[_Key, _Key]]:
        second: dict[str, list[_Key]] = {}
        for key in self._single:
            second.setdefault(key[0], []).append(key)
        return [
            (key, follow)
            for key in self._single
            if self._relations[key[1]].phrase is not None
            for follow in second.get(self._values[key][0], ())
            if self._documents[key] != self._documents[follow] and follow[1] != key[1]
        ]

    def _form(self, relation: Relation, subject: str) -> str:
        form = self._rng.choice(relation.questions)
        if subject.startswith("the "):
            form = form.replace("the {s}", "{s}")
        return form.format(s=subject)

    def _question(self, key: _Key, kind: str) -> ReaderQuestion:
        text = self._form(self._relations[key[1]], key[0])
        where = tuple(dict.fromkeys(self._documents[key]))
        return ReaderQuestion(text, ", ".join(self._values[key]), kind, where)

    def _ask_single(self) -> ReaderQuestion | None:
        return self._question(self._rng.choice(self._single), "single") if self._single else None

    def _ask_shared(self) -> ReaderQuestion | None:
        if not self._shared:
            return None
        return self._question(self._rng.choice(self._shared), "same_relation")

    def _ask_several(self) -> ReaderQuestion | None:
        if not self._several:
            return None
        return self._question(self._rng.choice(self._several), "multi_value")

    def _ask_two_hop(self) -> ReaderQuestion | None:
        if not self._chains:
            return None
        first, second = self._rng.choice(self._chains)
        phrase = self._relations[first[1]].phrase
        if phrase is None:
            return None
        text = self._form(self._relations[second[1]], phrase.format(s=first[0]))
        answer = f"{self._values[first][0]}; {self._values[second][0]}"
        where = (self._documents[first][0], self._documents[second][0])
        return ReaderQuestion(text, answer, "two_hop", where)

    def _ask_two_hop_directly(self) -> ReaderQuestion | None:
        """Ask for the end of a chain without its bridge."""
        question = self._ask_two_hop()
        if question is None:
            return None
        final = question.answer.partition("; ")[2]
        return ReaderQuestion(
            f"In short: {question.text}", final, "two_hop_direct", question.documents
        )

    def _ask_unanswerable(self) -> ReaderQuestion | None:
        """Ask about an unknown entity, or about a known one what no document says of it."""
        if self._rng.random() < 0.5:
            relation = self._relations[self._rng.choice(self._stated)]
            entity = self._world.label(relation.subject)
        else:
            entity = self._rng.choice(list(self._types))
            unsaid = [
                relation
                for relation in relations_of(self._types[entity])
                # "X makes Y" would half answer "which products does X sell": not asked.
                if not relation.many and (entity, relation.name) not in self._values
            ]
            if not unsaid:
                return None
            relation = self._rng.choice(unsaid)
        return ReaderQuestion(self._form(relation, entity), REFUSAL, "unanswerable", ())
