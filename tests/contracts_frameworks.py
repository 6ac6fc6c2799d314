"""What every framework of ours guarantees; its tests say by a `Framework` how it is asked.

Only what all of them promise stands here: answers and what is told of them, prefilling, rows of a
vector store, objects and tools. What one of them alone has is tested beside its adapter.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import hybrid_reader
import llama_smollm2 as llama
import pytest
from kv_cache_fields import FIELDS
from pydantic import BaseModel, Field
from scripted import THINKING, json_call, native_call, said, scripted_engine
from small import CHAT_TEMPLATE, Loop, make_model, make_tokenizer, make_untrained
from verdicts import REUSE, make_verdict
from zoo import HYBRIDS, build, byte_tokenizer

from kvcache_rag import (
    BestLast,
    CacheBlend,
    DiskStore,
    Engine,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    MemoryStore,
    Metrics,
    PromptTemplate,
    Reuse,
)
from kvcache_rag.errors import MissingExtraError, UnsupportedModelError
from kvcache_rag.integration import REFERENCE_KEYS, open_engine
from kvcache_rag.policies import policy_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sending import Row


@dataclass(frozen=True)
class Said:
    """An answer, however the framework gives it.

    Attributes:
        text: The answer itself.
        cost: `kv_cache`.
        sources: Ids of what was retrieved, where the framework hands that back.
    """

    text: str
    cost: dict[str, Any]
    sources: list[str] | None = None


@dataclass(frozen=True)
class Called:
    """An answer of a model with tools.

    Attributes:
        calls: Name and arguments of each call.
        cost: `kv_cache`.
        form: `tool_form`.
        thoughts: What it thought.
    """

    text: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    cost: dict[str, Any] = field(default_factory=dict)
    form: str = ""
    thoughts: str = ""


class Rows(ABC):
    """A vector store in memory or in a folder, whose rows refer to chunks."""

    @abstractmethod
    def add(self, texts: Mapping[str, str], page: int | None = None) -> None:
        """Write texts by their ids, with a page as their metadata."""

    @abstractmethod
    def fill(self) -> int:
        """Prefill what is missing."""

    @abstractmethod
    def delete(self, ids: Sequence[str]) -> None: ...

    @abstractmethod
    def find(self, count: int) -> list[Any]:
        """Documents as the framework's retriever gives them."""

    @abstractmethod
    def texts(self) -> dict[str, str]:
        """Texts by their ids."""

    @property
    @abstractmethod
    def raw(self) -> Any:
        """The collection of chromadb."""

    def metadata(self, id_: str) -> dict[str, Any]:
        """A row's metadata as it is stored; a framework's own fields have a `_` or a `_id`."""
        found = self.raw.get(ids=[id_])["metadatas"][0] or {}
        return {name: found[name] for name in found if name in ("page", *REFERENCE_KEYS)}


class Framework(ABC):
    """How one framework says what the contract asks; `most` is the length of an answer."""

    name: str
    """Of the class of models."""

    length: str
    """The option that limits an answer."""

    def llm(self, engine: Engine, most: int = 6, **fields: Any) -> Any:
        """A model over an engine."""
        return self.made(engine=engine, **{self.length: most}, **fields)

    @abstractmethod
    def named(self, model: Any, most: int = 6, **fields: Any) -> Any:
        """A model by its name."""

    @abstractmethod
    def made(self, **fields: Any) -> Any:
        """A model of these arguments."""

    @abstractmethod
    def document(self, text: str, id_: str = "", score: Any = None) -> Any: ...

    @abstractmethod
    def seen(self, document: Any) -> tuple[str, Any]:
        """Text and metadata of a document."""

    @abstractmethod
    def ask(self, llm: Any, question: str, documents: Sequence[Any], **options: Any) -> Said:
        """One question over documents."""

    @abstractmethod
    def now(self, llm: Any, question: str, documents: Sequence[Any], **options: Any) -> list[Said]:
        """The same by every way of asking that waits."""

    @abstractmethod
    async def later(
        self, llm: Any, question: str, documents: Sequence[Any], **options: Any
    ) -> list[Said]:
        """The same by every way of asking that leaves the event loop alone."""

    async def ways(
        self, llm: Any, question: str, documents: Sequence[Any], **options: Any
    ) -> list[Said]:
        """The same by every way of asking."""
        later = await self.later(llm, question, documents, **options)
        return [*self.now(llm, question, documents, **options), *later]

    @abstractmethod
    def plain(self, llm: Any, text: str) -> Said:
        """A question without documents."""

    @abstractmethod
    def behind_tools(self, llm: Any, question: str, found: Sequence[Sequence[Any]]) -> list[Said]:
        """What is said once tools found documents, by every form in which tools hand them on."""

    @abstractmethod
    def reranker(self, llm: Any, **options: Any) -> Any:
        """A `KVCacheRerank`."""

    @abstractmethod
    async def reranked(
        self, reranker: Any, question: str, documents: Sequence[Any]
    ) -> list[list[tuple[str, Any]]]:
        """Ids and scores, best first, by every way of asking."""

    @abstractmethod
    def rows(self, llm: Any, folder: Path | None = None) -> Rows:
        """A vector store."""

    @abstractmethod
    def object(self, llm: Any, kind: Any, question: str, documents: Sequence[Any] = ()) -> Any:
        """An answer as an object of a class."""

    @abstractmethod
    async def tools(self, llm: Any, question: str) -> list[Called]:
        """A model that may call `add`, by every way of asking."""

    agents: Sequence[Any]
    """Kinds of agents, or of the tools that they have."""

    query: str
    """The argument of the tool that searches."""

    hot: Mapping[str, Any]
    """Settings of a model that says something else each time."""

    @abstractmethod
    async def agent(
        self, llm: Any, question: str, facts: Mapping[str, str], kind: Any
    ) -> tuple[str, list[dict[str, Any]]]:
        """The answer of an agent with `add` and `search`, and `kv_cache` of each step.

        `search` finds those facts of which a query has the name.
        """

    @abstractmethod
    async def thinking(self, llm: Any, question: str, **options: Any) -> list[Called]:
        """By every way of asking."""


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    """Engines over the tiny model; every one has a store of its own unless it is given one."""

    def make(*, chat: bool = False, **options: Any) -> Engine:
        tokenizer = make_tokenizer()
        if chat:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.chat_template = CHAT_TEMPLATE
        options.setdefault("template", PromptTemplate(system="Read.\n"))
        return Engine(make_model(), tokenizer, **{"store": MemoryStore(), **options})

    return make


@pytest.fixture(scope="session")
def measured_engine() -> Engine:
    """Measuring a model takes a second, so most tests share an engine and empty its store."""
    template = PromptTemplate(system="Read.\n")
    engine = Engine(make_model(), make_tokenizer(), store=MemoryStore(), template=template)
    engine.add(["the prefix is computed with the first chunk"])
    return engine


@pytest.fixture
def engine(measured_engine: Engine) -> Engine:
    store: Any = measured_engine.store
    measured_engine._follow().capturing.prefix()  # a test may have changed weights or tokenizer
    MemoryStore.__init__(store)
    measured_engine.forget_buffer()  # the last test's prompt, from which one would go on
    return measured_engine


@pytest.fixture
def prefilled(engine: Engine) -> Callable[[], int]:
    """How many chunks were prefilled since the last call."""
    seen = [0]

    def count() -> int:
        puts = engine.store.stats().puts
        seen[0], fresh = puts, puts - seen[0]
        return fresh

    return count


@pytest.fixture
def loop() -> Loop:
    return Loop()


QUESTION = "Who keeps the lighthouse?"
# The first says nothing, the third what the second says.
NOTES = {
    "none": (" ", 0.2),
    "bakery": ("The bakery sells bread made of rye flour every day.", 0.8),
    "again": ("The bakery sells bread made of rye flour every day.", 0.8),
    "keeper": ("Marlow keeps the lighthouse, and he lives there.", 0.9),
    "harbour": ("The harbour was built in 1911, and rebuilt in 1934.", 0.1),
}
# Of three lengths, so that the number of fresh tokens says which of them was computed.
TEXTS = [
    "The cat sat on the mat beside the warm stove.",
    "A dog ran away from home and came back late at night.",
    "It rained for three long days, and then the river rose by a metre.",
]
SCORES = (0.1, 0.2, 0.9)
KINDS = [name for name in ("qwen3_5", "lfm2", "mamba2") if name in HYBRIDS]
JSON_FORM = pytest.mark.filterwarnings("ignore:chat template or tokenizer")
"""A tokenizer that says nothing of tools is held to JSON, with a warning."""


class Part(BaseModel):
    size: int = Field(ge=1, le=9)


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


class Finding(BaseModel):
    """What was found."""

    sure: bool
    mood: Mood
    kind: Literal["a", "b"] | None = None
    count: int = Field(ge=-5, le=5)
    parts: list[Part] = Field(max_length=2)
    name: str = Field(max_length=8)


class Contract:
    """What all contracts ask of."""

    framework: ClassVar[Framework]

    @pytest.fixture
    def model(self, engine: Engine) -> Any:
        return self.framework.llm(engine)

    def documents(self, scores: Sequence[Any] = (None,) * 3) -> list[Any]:
        """Of the three texts."""
        return [self.framework.document(*one) for one in zip(TEXTS, "abc", scores, strict=True)]

    def notes(self) -> list[Any]:
        """Documents of all notes."""
        return [self.framework.document(text, id_, score) for id_, (text, score) in NOTES.items()]


class AnswersContract(Contract):
    """Answers over documents, and what is told of them."""

    @pytest.fixture
    def fresh(self, engine: Engine) -> list[int]:
        """Fresh tokens where each of the texts is the best."""
        return [len(chunk) for chunk in engine.tokenize("?", TEXTS).chunks]

    async def test_every_way_of_asking_says_what_the_engine_says(
        self, model: Any, engine: Engine
    ) -> None:
        for scores in (SCORES, (None,) * 3):
            ranked: Any = {} if None in scores else {"scores": scores}
            expected = engine.generate(
                "Who sat?", TEXTS, policy=BestLast(), max_new_tokens=6, **ranked
            ).text
            found = await self.framework.ways(
                model, "Who sat?", self.documents(scores), policy="bestlast"
            )
            assert [one.text for one in found] == [expected] * len(found)

    async def test_no_way_of_asking_that_is_awaited_blocks_the_loop(
        self, model: Any, loop: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop.watch(monkeypatch, type(make_model()), "forward")
        found = await self.framework.later(model, "Who sat?", self.documents())
        assert loop.turns > 3 * len(found)

    @pytest.mark.parametrize(
        ("policy", "places", "unused"),
        [
            ("bestfew:1", [3], 2),
            ("bestfew:2", [3, 1], 1),
            ("bestlast", [1, 4, 3], 0),
            ("full", [1, 3, 4], 0),
        ],
    )
    async def test_every_way_of_asking_tells_what_it_was_answered_from(
        self, model: Any, policy: str, places: list[int], unused: int
    ) -> None:
        given = self.notes()
        before = [copy.deepcopy(self.framework.seen(one)) for one in given]
        for one in await self.framework.ways(model, QUESTION, given, policy=policy):
            ids = [[*NOTES][place] for place in places]
            names = ("answered_from", "answered_from_ids", "unused_chunks")
            assert [one.cost[name] for name in names] == [places, ids, unused]
            assert Metrics.from_dict(one.cost).answered_from == tuple(places)
            if one.sources is not None:
                assert [one.sources[place] for place in places] == ids
        assert [self.framework.seen(one) for one in given] == before, "it would be in the chunk"

    def test_without_documents_there_are_none(self, model: Any) -> None:
        for one in (
            self.framework.plain(model, "Hello"),
            self.framework.ask(model, QUESTION, []),
        ):
            assert (one.cost["answered_from"], one.cost["answered_from_ids"]) == ([], [])
            assert (one.cost["reused_tokens"], one.cost["missed"]) == (0, [])

    # ------------------------------------------------------------------ scores
    @pytest.mark.parametrize(
        ("scores", "best"),
        [
            (SCORES, 2),
            ((0, 1, 0), 1),
            ((0.1, None, 0.9), 0),
            ((None,) * 3, 0),
            ((0.1, float("nan"), 0.9), 0),
        ],
    )
    async def test_every_way_of_asking_hands_scores_on(
        self, model: Any, fresh: list[int], scores: Sequence[Any], best: int
    ) -> None:
        given = self.documents(scores)
        for one in await self.framework.ways(model, "Who sat?", given, policy="bestlast"):
            assert one.cost["fresh_tokens"] == fresh[best]

    @JSON_FORM
    @pytest.mark.parametrize(
        ("found", "scores", "best"),
        [
            (["012"], (None,) * 3, 0),
            (["012"], SCORES, 2),
            (["0", "21"], (None,) * 3, 2),
            (["2", "01"], SCORES, 1),
            (["2", "01"], (None, 0.2, 0.9), 0),
            (["012", "1"], SCORES, 1),
        ],
    )
    def test_the_best_of_the_last_call_of_a_tool_is_computed_with_the_question(
        self, engine: Engine, fresh: list[int], found: list[str], scores: Any, best: int
    ) -> None:
        llm = self.framework.llm(engine, 2, policy="bestlast")
        every = self.documents(scores)
        calls = [[every[int(place)] for place in places] for places in found]
        assert len({*fresh}) == len(fresh), "it must be able to fail"
        told = self.framework.behind_tools(llm, "Who sat?", calls)
        assert {one.cost["fresh_tokens"] for one in told} == {fresh[best]}

    @JSON_FORM
    def test_documents_of_tools_are_told_of_by_their_ids(self, engine: Engine) -> None:
        given = self.notes()
        few = self.framework.llm(engine, policy="bestfew:1")
        told = self.framework.behind_tools(few, QUESTION, [given])
        assert told
        for one in told:
            assert (one.cost["answered_from_ids"], one.cost["unused_chunks"]) == (["keeper"], 2)

    # ------------------------------------------------------------------ a gate
    async def test_a_gate_answers_by_full_prefill_with_the_reason(
        self, make_engine: Callable[..., Engine]
    ) -> None:
        plain = make_engine()
        gated = make_engine(gate=make_verdict(plain.identity, {REUSE: 0.831}))
        full = plain.generate("Who sat?", TEXTS, policy=FullRecompute(), max_new_tokens=4)
        llm = self.framework.llm(gated, 4)
        found = await self.framework.ways(llm, "Who sat?", self.documents())
        for one in found:
            assert one.cost["gate"].startswith("fell back to FullRecompute(): Reuse(")
            assert (one.cost["policy"], one.text) == ("FullRecompute()", full.text)
        assert self.framework.plain(llm, "Hello").cost["gate"] == ""

    def test_a_verdict_file_is_a_setting(self, tmp_path: Path) -> None:
        file = tmp_path / "verdict.json"
        make_verdict(Engine.from_pretrained("tiny").identity, {REUSE: 0.831}).save(file)
        llm = self.framework.named("tiny", 4, gate=file)
        # A gate that is lost on the way to another process would let everything pass.
        for one in (llm, pickle.loads(pickle.dumps(llm))):
            found = self.framework.ask(one, "Who sat?", self.documents())
            assert found.cost["gate"].startswith("fell back to FullRecompute(): Reuse(")

    # ------------------------------------------------------------------ models
    @pytest.mark.parametrize("name", ["gpt2", "recurrent_gemma"])
    async def test_a_model_that_cannot_be_stitched_answers_with_one_warning(
        self, name: str
    ) -> None:
        engine = Engine(build(name), byte_tokenizer(), template=PromptTemplate(system="Read.\n"))
        llm = self.framework.llm(engine, 4)
        rows = self.framework.rows(llm)
        said = "it answers by full prefill, as with policy=FullRecompute"
        with pytest.warns(UserWarning, match=said) as told:
            rows.add({"a": TEXTS[0], "b": TEXTS[1]})
        assert (len(told), rows.metadata("a"), engine.store.stats().puts) == (1, {}, 0)
        # From now on not a word: warnings are errors here.
        found = await self.framework.ways(llm, "Who sat?", rows.find(2))
        assert {one.cost["policy"] for one in found} == {"FullRecompute()"}
        assert len({one.text for one in found}) == 1
        assert self.framework.plain(llm, "Hello").text
        with pytest.raises(UnsupportedModelError, match=r"FullRecompute\(\)"):
            self.framework.ask(llm, "Who sat?", rows.find(2), policy=Reuse())
        rows.delete(["a", "b"])
        assert rows.texts() == {}

    @pytest.mark.parametrize("name", KINDS)
    async def test_hybrids_answer_from_stored_chunks_in_any_order(
        self, name: str, tmp_path: Path
    ) -> None:
        template = PromptTemplate(system="Read.\n")
        model, tokenizer = build(name), byte_tokenizer()

        def opened() -> Any:
            store = DiskStore(tmp_path / "kv", durable=False)
            return self.framework.llm(Engine(model, tokenizer, template=template, store=store))

        self.framework.rows(opened(), tmp_path / "db").add(dict(zip("abc", TEXTS, strict=True)))
        llm = opened()  # as after a restart
        found = self.framework.rows(llm, tmp_path / "db").find(3)
        reference = Engine(model, tokenizer, template=template, store=MemoryStore())
        for documents in (found, found[::-1], [found[1], found[0]]):
            texts = [self.framework.seen(one)[0] for one in documents]
            expected = reference.generate("Who sat?", texts, policy=Reuse(), max_new_tokens=6).text
            first = self.framework.ask(llm, "Who sat?", documents)
            assert (first.text, first.cost["hits"]) == (expected, {"disk": len(documents)})
            assert first.cost["references"] == len(documents)
        ways = await self.framework.ways(llm, "Who sat?", documents)
        assert {one.text for one in ways} == {expected}

    def test_the_policy_of_the_llm_is_that_of_the_engine(self) -> None:
        """For which it cuts its chunks."""
        assert self.framework.named("tiny", policy=LegoLink(4)).engine.policy == LegoLink(4)

    @pytest.mark.skipif(
        not hybrid_reader.IS_READ, reason="this transformers keeps no states as 5.23"
    )
    def test_heads_are_cut_for_the_policy_of_the_llm(self) -> None:
        llm = self.framework.named(str(hybrid_reader.FOLDER), 1, policy=LegoLink(4))
        texts, entity, value = hybrid_reader.asked()[0]
        answer = self.framework.ask(llm, entity, [*map(self.framework.document, texts)])
        assert answer.text.strip() == value
        assert answer.cost["recomputed_tokens"] == 4 * (len(texts) - 1)

    @pytest.mark.parametrize("told", ["settings", "call"])
    def test_who_asks_an_untrained_model_for_plain_reuse_is_told_once(self, told: str) -> None:
        engine, asked = Engine(make_untrained(), make_tokenizer()), {"policy": "reuse"}
        settings, call = (asked, {}) if told == "settings" else ({}, asked)
        llm = self.framework.llm(engine, 2, **settings)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            self.framework.ask(self.framework.llm(engine, 2), "Who sat?", self.documents())
            assert not found, "the default"
            for _ in range(2):
                self.framework.ask(llm, "Who sat?", self.documents(), **call)
        assert [repr(Reuse()) in str(one.message) for one in found] == [True]

    def test_a_copy_has_settings_of_its_own(self) -> None:
        llm = self.framework.named("tiny", generate_kwargs={"num_beams": 1})
        other = copy.deepcopy(llm)
        other.generate_kwargs["num_beams"] = 2
        assert llm.generate_kwargs == {"num_beams": 1}

    def test_a_weight_format_is_a_setting(self) -> None:
        plain = Engine.from_pretrained("tiny")
        rounded = self.framework.named("tiny", weight_format="int8")
        assert rounded.engine.spec == Engine.from_pretrained("tiny", weight_format="int8").spec
        assert self.framework.named("tiny").engine.spec == plain.spec != rounded.engine.spec
        assert pickle.loads(pickle.dumps(rounded)).weight_format == "int8"
        assert self.framework.llm(plain, weight_format="auto").engine is plain

    @pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
    def test_a_gguf_file_and_an_adapter_are_models(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("gguf", reason="pip install 'kvcache-rag[gguf]'")
        from gguf_files import write_gguf
        from peft import LoraConfig, get_peft_model

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        path, folder = write_gguf(tmp_path / "model.gguf"), tmp_path / "adapter"
        plain = Engine.from_pretrained(path, weight_format="plain")  # as PEFT needs it
        spec = plain.spec
        assert self.framework.named(str(path)).engine.spec == spec
        kwargs = {"gguf_file": path.name}
        assert self.framework.named(str(tmp_path), model_kwargs=kwargs).engine.spec == spec
        settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        get_peft_model(plain.model, settings).save_pretrained(str(folder))
        adapted = self.framework.named(str(path), 2, adapter=folder)
        assert adapted.engine.spec != spec
        assert self.framework.plain(adapted, "who?").text
        with pytest.raises(InvalidInputError, match="adapter belong"):
            self.framework.llm(plain, adapter=folder)

    def test_the_name_of_an_adapter_stays_one_and_a_path_is_a_folder(self) -> None:
        for given, kept in (
            ("block", "block"),
            ("./block", "./block"),
            (Path("block"), str(Path.cwd() / "block")),
        ):
            assert self.framework.named("smollm2", adapter=given).adapter == kept

    def test_chunks_are_attended_to_where_they_lie_if_that_is_wanted(self) -> None:
        llm = self.framework.named("tiny", 1, rotation="deferred")
        found = self.framework.ask(llm, "Who sat?", self.documents())
        assert found.cost["rotation"] == "deferred"

    # ------------------------------------------------------------------ what cannot be used
    REFUSED: ClassVar[list[tuple[dict[str, Any], str]]] = [
        ({"policy": CacheBlend}, r"^policy must be such as Reuse\(\) .*; write CacheBlend\(\)$"),
        ({"policy": 3}, "^policy must be such as .*, not 3$"),
        ({"policy": "fast"}, "^there is no policy 'fast'"),
        ({"kv_codec": "int2"}, "^kv_codec cannot be used: [^\n]*$"),
        ({"kv_dir": 3}, "^kv_dir cannot be used: must be a path, not a int$"),
        ({"kv_max_bytes": "ten GB"}, "^kv_max_bytes cannot be used: [^\n]*$"),
        ({"kv_max_bytes": 0}, "^kv_max_bytes cannot be used: [^\n]*$"),
        ({"rotation": "lazy"}, "^rotation cannot be used: [^\n]*$"),
        ({"kv_ttl": 0}, "^kv_ttl cannot be used: [^\n]*$"),
        ({"overflow": "cut"}, "^overflow (cannot be used|is no argument)"),
        ({"weight_format": "int2"}, "^weight_format cannot be used"),
        ({"gate": 7}, "^gate cannot be used: must be a path, not a int$"),
        ({"ttl": 3}, "^ttl is no argument of {name}; say it by kv_ttl=$"),
        ({"codec": "int8"}, "^codec is no argument of {name}; say it by kv_codec=$"),
        ({"zzz": 3}, "^zzz is no argument of {name}; leave it out$"),
        ({"kvdir": 3}, r"^kvdir is no argument of {name}; did you mean kv_dir\?$"),
        ({"{length}": 0}, "^{length} cannot be used: [^\n]*$"),
    ]

    @pytest.mark.parametrize(("fields", "sentence"), REFUSED)
    def test_a_setting_of_no_use_is_told_in_one_sentence(
        self, fields: dict[str, Any], sentence: str
    ) -> None:
        words = {"{name}": self.framework.name, "{length}": self.framework.length}
        given = {words.get(name, name): value for name, value in fields.items()}
        for word, meant in words.items():
            sentence = sentence.replace(word, meant)
        with pytest.raises(InvalidInputError, match=sentence):
            self.framework.named("tiny", **{self.framework.length: 6, **given})

    @pytest.mark.parametrize(
        "fields",
        [
            *({"kv_dir": "x"}, {"system_prompt": "x"}, {"template": PromptTemplate()}),
            *({"gate": "x"}, {"weight_format": "int8"}, {"rotation": "copied"}),
        ],
    )
    def test_settings_of_a_new_engine_are_refused_beside_one(
        self, engine: Engine, fields: dict[str, Any]
    ) -> None:
        with pytest.raises(InvalidInputError, match=f"with engine=, {next(iter(fields))} belong"):
            self.framework.llm(engine, **fields)

    def test_a_model_that_is_missing_or_misspelt_is_told_at_once(self) -> None:
        with pytest.raises(InvalidInputError, match="no model 'smolm2'; did you mean 'smollm2'"):
            self.framework.named("smolm2")
        self.framework.named("smolm2", base_url="http://127.0.0.1:9")  # a server's own name
        for fields in ({}, {"kv_dir": "kv"}):
            with pytest.raises(InvalidInputError, match=f"^{self.framework.name} needs a model: "):
                self.framework.made(**fields)

    def test_where_no_document_says_it_that_is_the_answer(self) -> None:
        llm = self.framework.named("tiny", none_below=1e6)
        told = self.framework.ask(llm, QUESTION, self.documents())
        assert told.text == "None of the documents says it."
        assert told.cost["says_none"]
        assert [one["chunk"] for one in told.cost["relevance"]] == [0, 1, 2]
        assert self.framework.plain(llm, "Who is it?").text != told.text

    def test_a_policy_by_name(self, engine: Engine) -> None:
        llm = self.framework.llm(engine, 2, policy="cacheblend:0.5")
        found = self.framework.ask(llm, "Who sat?", self.documents())
        assert found.cost["policy"] == repr(policy_by_name("cacheblend:0.5"))
        found = self.framework.ask(llm, "Who sat?", self.documents(), policy="full")
        assert found.cost["policy"] == "FullRecompute()"

    def test_the_form_of_the_chunks_their_time_to_live_and_the_limit(self, tmp_path: Path) -> None:
        given: dict[str, Any] = {"kv_codec": "int8", "kv_ttl": 60, "kv_max_bytes": 10**6}
        llm = self.framework.named("tiny", kv_dir=tmp_path, **given)
        memory, disk = llm.engine.store.tiers
        assert (memory.codec.name, disk.codec.name) == ("int8-kc-vt", "int8-kc-vt")
        assert (memory.ttl, disk.ttl) == (60, 60)
        assert disk.max_bytes == 10**6


class RowsContract(Contract):
    """What is prefilled, what is noted beside rows, and what deletion lets go of."""

    @pytest.fixture
    def rows(self, model: Any) -> Rows:
        return self.framework.rows(model)

    # ------------------------------------------------------------------ without a vector store
    def test_what_was_prefilled_is_reused(self, model: Any, engine: Engine, prefilled: Any) -> None:
        given = self.documents()
        keys = model.prefill([*given, given[0], self.framework.document(" ", "z")])
        assert keys == [*engine.keys([*TEXTS, TEXTS[0]]), None]
        assert prefilled() == 3
        found = self.framework.ask(model, "Who sat?", given)
        assert (found.cost["misses"], prefilled()) == (0, 0)

    async def test_prefilling_does_not_block(self, model: Any, loop: Any, monkeypatch: Any) -> None:
        loop.watch(monkeypatch, type(make_model()), "forward")
        given = self.documents()
        assert await model.aprefill(given) == model.engine.keys(TEXTS)
        assert loop.turns

    def test_prefill_says_what_it_cannot_use(self, model: Any, prefilled: Any) -> None:
        given = [self.framework.document(TEXTS[0]), self.framework.document("cat " * 9999, "long")]
        with pytest.warns(UserWarning, match="row 'long'"):
            assert model.prefill(given) == [*model.engine.keys(TEXTS[:1]), None]
        assert prefilled() == 1

    def test_text_that_is_not_unicode_is_told_before_anything_is_written(
        self, model: Any, rows: Rows
    ) -> None:
        odd = self.framework.document("A \ud800 cat.", "odd")
        for call in (
            lambda: rows.add({"fine": "A dog.", "odd": "A \ud800 cat."}),
            lambda: model.prefill([odd]),
            lambda: self.framework.ask(model, "Who?", [odd]),
        ):
            with pytest.raises(InvalidInputError, match=r"'odd' is not valid Unicode"):
                call()
        for bad in (lambda: rows.add({"\ud800": "A cat."}), lambda: rows.delete(["\ud800"])):
            with pytest.raises(InvalidInputError, match="is not valid Unicode"):
                bad()
        assert rows.texts() == {}

    # ------------------------------------------------------------------ what an answer says
    def test_kv_cache_has_the_documented_fields_and_reasons(
        self, make_engine: Callable[..., Engine], tmp_path: Path
    ) -> None:
        engine = make_engine(store=DiskStore(tmp_path / "kv", durable=False))
        llm = self.framework.llm(engine, 4)
        rows = self.framework.rows(llm)
        rows.add(dict(zip("abc", TEXTS, strict=True)))
        first = self.framework.ask(llm, "A cat?", rows.find(2)).cost
        assert ({*first}, first["missed"], first["references"]) == (FIELDS, [], 2)
        for key in engine.keys(TEXTS):
            engine.store.delete(key)
        second = self.framework.ask(llm, "A cat?", rows.find(2)).cost
        assert [one["reason"] for one in second["missed"]] == ["evicted", "evicted"]
        own = {name: second[name] for name in ("answered_from_ids", "prompt")}
        assert {**Metrics.from_dict(second).to_dict(), **own} == second
        assert {*self.framework.plain(llm, "Hello").cost} == FIELDS

    # ------------------------------------------------------------------ references
    def test_a_reference_stands_in_the_row(
        self, rows: Rows, engine: Engine, prefilled: Any
    ) -> None:
        rows.add({"a": TEXTS[0]}, page=3)
        assert prefilled() == 1
        ((text, _),) = map(self.framework.seen, rows.find(1))
        (key,) = engine.keys([text])
        row = rows.metadata("a")
        assert row.keys() == {"page", *REFERENCE_KEYS}
        assert (row["kv_key"], row["kv_spec"]) == (key.digest, engine.spec)
        assert (row["kv_tokens"], row["kv_bytes"] > 0) == (key.tokens, True)
        assert all(len(str(row[name])) <= 128 for name in REFERENCE_KEYS)
        assert engine.store.contains(key)

    # What others may have written in place of a field of a reference; Chroma keeps scalars.
    ODD: ClassVar[dict[str, tuple[Any, ...]]] = {
        "kv_key": ("", "x", "0" * 64, "../../etc", "a" * 100_000, 7, 1e300, True, [1.5]),
        "kv_spec": ("", "x", "0" * 64, 7, 1e300, True, [1.5]),
        "kv_text": ("", "x", "0" * 64, 7, 1e300, True, [1.5]),
        "kv_tokens": (-1, 0, 1, 2, 2**62, 1e300, float("inf"), "x", "", 1.5, True, [1.5]),
        "kv_bytes": (-1, 0, 10**18, 1e300, float("inf"), "x", 1.5, True, [1.5]),
    }

    @pytest.mark.parametrize("name", ODD)
    def test_law_no_field_of_a_reference_decides_anything(
        self, make_engine: Callable[..., Engine], tmp_path: Path, name: str
    ) -> None:
        """A number of tokens of 1e300 once failed every question that found the row."""
        kv = DiskStore(tmp_path, durable=False)
        engine = make_engine(store=kv)
        llm = self.framework.llm(engine, 4)
        rows = self.framework.rows(llm)
        rows.add(dict(zip("abc", TEXTS, strict=True)))
        keys, held = engine.keys(TEXTS), rows.metadata("b")

        def answer(policy: Any, overflow: str) -> tuple[str, int]:
            found = self.framework.ask(llm, "Who?", rows.find(3), policy=policy, overflow=overflow)
            return found.text, found.cost["prompt_tokens"]

        plain = [(Reuse(), one) for one in ("error", "drop_lowest", "refine")]
        for policy in (*plain, (FullRecompute(), "error")):
            expected = answer(*policy)
            for value in self.ODD[name]:
                rows.raw.update(ids=["b"], metadatas=[{name: value}])
                assert answer(*policy) == expected, value
                assert all(map(kv.contains, keys)), value
                assert kv.stats().corrupt == 0, value
                rows.raw.update(ids=["b"], metadatas=[{name: held[name]}])
        rows.raw.update(ids=["b"], metadatas=[{name: self.ODD[name][-2]}])
        assert rows.fill() == 1
        assert rows.metadata("b") == held
        rows.raw.update(ids=["c"], metadatas=[{name: 1e300}])
        rows.delete(["a", "b", "c"])
        assert rows.texts() == {}

    def test_a_row_of_another_model_says_so(
        self, make_engine: Callable[..., Engine], model: Any, tmp_path: Path
    ) -> None:
        other = make_engine(template=PromptTemplate(system="Another instruction.\n"))
        self.framework.rows(self.framework.llm(other), tmp_path).add({"a": TEXTS[0]})
        found = self.framework.rows(model, tmp_path).find(1)
        (missed,) = self.framework.ask(model, "A?", found).cost["missed"]
        assert (missed["chunk"], missed["reason"]) == (0, "other model")

    # ------------------------------------------------------------------ writing and deleting
    def test_a_row_that_is_replaced_or_deleted_lets_its_chunk_go(
        self, rows: Rows, engine: Engine, prefilled: Any
    ) -> None:
        def held() -> str:
            """Of which letters a chunk is held, with metadata before it or without."""
            store: Any = engine.store
            store.sweep()
            texts = [*"abn", *(f"page: 1\n\n{one}" for one in "abn")]
            keys = zip(texts, engine.keys(texts), strict=True)
            return "".join(sorted(text[-1] for text, key in keys if store.contains(key)))

        rows.add({"1": "a", "2": "b", "3": "b"}, page=1)
        rows.add({"1": "n"})
        assert rows.texts() == {"1": "n", "2": "b", "3": "b"}
        assert rows.metadata("1").keys() == {*REFERENCE_KEYS}, "of the old one nothing stays"
        assert held() == "bn"
        rows.delete(["2", "nope"])
        assert held() == "bn", "the third row has the text of the second"
        rows.delete(["1", "3"])
        assert (held(), prefilled()) == ("", 3)

    def test_text_that_is_too_long_has_no_reference(self, rows: Rows, prefilled: Any) -> None:
        """So an indexing run that deletes old versions loses nothing by it."""
        with pytest.warns(UserWarning, match="row 'b' written without a reference"):
            rows.add({"a": "Short.", "b": "x" * 5000})
        assert ["kv_key" in rows.metadata(id_) for id_ in "ab"] == [True, False]
        assert (rows.texts()["b"], prefilled()) == ("x" * 5000, 1)

    def test_what_is_missing_is_prefilled(self, rows: Rows, engine: Engine, prefilled: Any) -> None:
        rows.add({"a": "First.", "b": "Second."})
        held = rows.metadata("a")
        bare: Any = dict.fromkeys(REFERENCE_KEYS)
        rows.raw.update(ids=["a"], metadatas=[bare])
        assert (rows.metadata("a"), prefilled()) == ({}, 2)
        assert (rows.fill(), rows.metadata("a"), prefilled()) == (1, held, 0)
        # Evicted KV comes back too, though no reference has to be written.
        engine.store.delete(engine.keys(["Second."])[0])
        assert (rows.fill(), prefilled()) == (0, 1)
        assert (rows.fill(), prefilled()) == (0, 0)


class RerankContract(Contract):
    """Documents ranked by how likely the question is behind each."""

    async def ranked(self, llm: Any, question: str = QUESTION, **options: Any) -> list[Any]:
        """Ids and scores of the notes, by every way of asking."""
        reranker = self.framework.reranker(llm, **options)
        return await self.framework.reranked(reranker, question, self.notes())

    async def test_law_the_scores_are_those_of_the_engine(
        self, model: Any, engine: Engine, prefilled: Any
    ) -> None:
        texts = {id_: text for id_, (text, _) in NOTES.items() if text.strip()}
        scores = dict(zip(texts, engine.read(QUESTION, [*texts.values()]).relevance, strict=True))
        order = sorted(scores, key=lambda id_: -scores[id_])
        prefilled()
        given = self.notes()
        before = [self.framework.seen(one) for one in given]
        ways = await self.framework.reranked(self.framework.reranker(model), QUESTION, given)
        assert len(ways) > 1
        for way in ways:
            assert [id_ for id_, _ in way] == [*order, "none"]
            expected = pytest.approx([scores[id_] for id_ in order], abs=1e-3)
            assert [score for _, score in way[:-1]] == expected
        assert prefilled() == 0
        assert [self.framework.seen(one) for one in given] == before

    async def test_as_many_are_left_as_are_wanted(self, model: Any) -> None:
        every = (await self.ranked(model))[0]
        for count in (1, 3, 99):
            for way in await self.ranked(model, top_n=count):
                assert way == every[:count]
        reranker = self.framework.reranker(model)
        assert await self.framework.reranked(reranker, QUESTION, []) == [[], []]

    async def test_mistakes_are_told(self, model: Any) -> None:
        with pytest.raises(InvalidInputError, match="top_n must be at least 1, not 0"):
            await self.ranked(model, top_n=0)
        with pytest.raises(InvalidInputError, match="the question is empty"):
            await self.ranked(model, " ")
        with pytest.raises(InvalidInputError, match="did you mean top_n"):
            self.framework.reranker(model, topn=1)
        far = self.framework.made(base_url="http://localhost:1")
        with pytest.raises(InvalidInputError, match="by a model of this process; leave base_url="):
            await self.ranked(far)


class ObjectsContract(Contract):
    """Answers that are held to a class."""

    @pytest.fixture
    def patient(self, engine: Engine) -> Any:
        return self.framework.llm(engine, 400)

    def test_objects_fit_their_class_and_samples_do_too(self, engine: Engine) -> None:
        wild = self.framework.llm(engine, 2000, **self.framework.hot)
        found = [self.framework.object(wild, Finding, "what?") for _ in range(4)]
        found.append(self.framework.object(self.framework.llm(engine, 400), Finding, "what?"))
        for one in found:
            assert isinstance(one, Finding)
            assert Finding.model_validate(one.model_dump()) == one
        assert len({one.model_dump_json() for one in found}) > 1

    def test_chunks_are_reused_and_the_schema_stands_behind_the_question(
        self, patient: Any, engine: Engine, prefilled: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, real = list[str](), engine.generate

        def spy(question: str, *arguments: Any, **options: Any) -> Any:
            asked.append(question)
            return real(question, *arguments, **options)

        monkeypatch.setattr(engine, "generate", spy)
        engine.add(TEXTS)
        prefilled()
        given = self.documents()
        assert isinstance(self.framework.object(patient, Finding, "what?", given), Finding)
        assert prefilled() == 0
        before, _, schema = asked[0].partition("\n\nAnswer with JSON that fits this schema: ")
        assert before == "what?"
        assert json.loads(schema) == Finding.model_json_schema()

    def test_objects_are_made_whatever_no_document_says(self) -> None:
        """In a real vocabulary, too, of which a wild answer may have any token."""
        doubting = self.framework.named("tiny", 2000, none_below=1e6, **self.framework.hot)
        given = self.documents()
        assert isinstance(self.framework.object(doubting, Finding, "what?", given), Finding)

    def test_the_extra_is_named(self, patient: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        sentence = r"llguidance is not installed: pip install 'kvcache-rag\[structured\]'"
        with pytest.raises(MissingExtraError, match=sentence):
            self.framework.object(patient, Finding, "what?")


class ToolsContract(Contract):
    """Answers of a model with tools, and agents."""

    def scripted(self, *answers: str, **options: Any) -> tuple[Any, list[str]]:
        """A model that gives these answers, one after the other, and what it was asked."""
        settings = {name: options.pop(name) for name in [*options] if name not in _OF_ENGINE}
        engine, seen = scripted_engine(*answers, **options)
        return self.framework.llm(engine, 400, **settings), seen

    @pytest.fixture(params=[native_call, json_call], ids=["native", "json"])
    def call(self, request: pytest.FixtureRequest) -> Callable[..., str]:
        found: Callable[..., str] = request.param
        return found

    @JSON_FORM
    async def test_calls_of_tools_are_read_by_every_way_of_asking(
        self, call: Callable[..., str]
    ) -> None:
        wanted = [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})]
        llm, _ = self.scripted(*[call(*wanted)] * 4, native=call is native_call)
        for one in await self.framework.tools(llm, "Add."):
            assert (one.calls, one.text) == (wanted, "")
            assert one.form == ("native" if call is native_call else "json")
            assert one.cost["query_tokens"] > 0
        llm, _ = self.scripted(*[said("Three.", call)] * 4, native=call is native_call)
        for one in await self.framework.tools(llm, "Add."):
            assert (one.calls, one.text) == ([], "Three.")

    async def test_the_json_form_is_told_once(self) -> None:
        llm, _ = self.scripted(*[said("Three.", json_call)] * 8, native=False)
        with pytest.warns(UserWarning, match="held to JSON by a grammar"):
            await self.framework.tools(llm, "Add.")
        await self.framework.tools(llm, "Add.")  # warnings are errors here

    @JSON_FORM
    @pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
    @pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince211")
    @pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
    async def test_an_agents_later_steps_reuse_what_its_tools_found(
        self, call: Callable[..., str]
    ) -> None:
        facts = {
            "Mora": "The ship Mora was built in Kiel by the brothers Tesk in the year 1911.",
            "Vug": "Captain Vug has sailed the ship Mora for eleven years without a day of rest.",
        }
        name = self.framework.query
        steps = (
            call(("search", {name: "Mora"})),
            call(("search", {name: "Mora, Vug"}), ("add", {"a": 1, "b": 2})),
            said("Vug, in Kiel.", call),
        )
        for kind in self.framework.agents:
            llm, seen = self.scripted(*steps, native=call is native_call)
            text, costs = await self.framework.agent(llm, "Who sails the Mora?", facts, kind)
            assert text == "Vug, in Kiel."
            sizes = {one: llm.engine.keys([fact])[0].tokens for one, fact in facts.items()}
            assert [one["reused_tokens"] for one in costs] == [0, 0, sizes["Mora"]]
            assert [one["prefilled_tokens"] for one in costs] == [0, sizes["Mora"], sizes["Vug"]]
            assert "in the year 1911" not in seen[2]
            assert '[document 2 above: "Captain Vug' in seen[2]

    @pytest.mark.parametrize(
        ("said_by", "answer"), [("settings", "hm\n</think>\nYes."), ("call", "hm</think>Yes.")]
    )
    async def test_thoughts_are_no_part_of_the_answer(self, said_by: str, answer: str) -> None:
        on: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
        settings, call = (on, {}) if said_by == "settings" else ({}, on)
        llm, seen = self.scripted(*[answer] * 4, native=False, template=THINKING, **settings)
        for one in await self.framework.thinking(llm, "Well?", **call):
            assert (one.text, one.thoughts) == ("Yes.", "hm")
        assert all(prompt.endswith("<assistant><think>\n") for prompt in seen)
        plain, seen = self.scripted(*["Yes."] * 4, native=False, template=THINKING)
        for one in await self.framework.thinking(plain, "Well?"):
            assert (one.text, one.thoughts) == ("Yes.", "")
        assert all(prompt.endswith("<assistant>") for prompt in seen)


_OF_ENGINE = ("native", "template")


class Keeper(BaseModel):
    """Who keeps a building."""

    name: str = Field(max_length=12)
    year: int = Field(ge=1000, le=2000)


class LlamaCppContract(Contract):
    """A GGUF file in llama.cpp: the engine's own answers, reused after a restart."""

    policy: ClassVar[Any] = policy_by_name("legolink:4")
    most = 60

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("llamacpp")

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, place: Path) -> Any:
        how: dict[str, Any] = {**llama.HOW, "policy": cls.policy, "kv_dir": str(place / "kv")}
        return cls.framework.named(llama.NAME, cls.most, **how)

    async def test_every_way_of_asking_says_what_the_engine_says(self, llm: Any) -> None:
        given = [self.framework.document(text) for text in llama.TEXTS]
        expected = llama.engine().generate(
            llama.QUESTION, llama.TEXTS, policy=self.policy, max_new_tokens=self.most
        )
        assert self.framework.ask(llm, llama.QUESTION, given).text == expected.text != ""
        # In other cells llama.cpp rounds otherwise, which a question with clear answers can stand.
        ways = await self.framework.ways(llm, f"Repeat: {llama.TEXTS[2]}", given)
        assert [one.text for one in ways] == [llama.TEXTS[2]] * len(ways)

    def test_rows_refer_to_chunks_and_a_restart_reuses_every_token(
        self, llm: Any, place: Path
    ) -> None:
        self.framework.rows(llm, place / "db").add(dict(zip("abc", llama.TEXTS, strict=True)))
        engine = llama.engine(store=DiskStore(place / "kv"))
        again = self.framework.llm(engine, self.most, policy=self.policy)
        rows = self.framework.rows(again, place / "db")
        for id_, key in zip("abc", engine.keys(llama.TEXTS), strict=True):
            assert rows.metadata(id_)["kv_key"] == key.digest
        found = rows.find(3)
        answer = self.framework.ask(again, llama.QUESTION, found)
        assert answer.text == self.framework.ask(llm, llama.QUESTION, found).text
        tokens = sum(map(len, engine.tokenize("?", llama.TEXTS).chunks))
        assert (answer.cost["hits"], answer.cost["reused_tokens"]) == ({"disk": 3}, tokens)

    def test_an_answer_is_held_to_a_class(self, llm: Any) -> None:
        assert isinstance(self.framework.object(llm, Keeper, "Ann came in 1987."), Keeper)

    def test_what_does_not_go_together_is_one_sentence(self, llm: Any) -> None:
        named = self.framework.named
        for make, sentence in (
            (lambda **how: self.framework.llm(llm.engine, **how), "backend belong to the engine"),
            (
                lambda **how: self.framework.made(base_url="http://a", **how),
                "with base_url=, backend is the server's to say",
            ),
            (lambda **how: named("tiny", **how), "runs GGUF files, and 'tiny' is none"),
            (
                lambda **how: named(llama.NAME, weight_format="int4", **how),
                "weights as the file has them, not int4",
            ),
            (
                lambda **how: named(llama.NAME, model_kwargs={"n_gpu_layer": 0}, **how),
                "n_gpu_layer is no option of backend=.*did you mean n_gpu_layers",
            ),
            (
                lambda **how: open_engine(make_model(), make_tokenizer(), **how),
                "a loaded one of transformers was given",
            ),
        ):
            with pytest.raises(InvalidInputError, match=sentence):
                _ = make(backend=llama.BACKEND).engine
        model, tokenizer, _ = llama.loaded()
        with pytest.raises(InvalidInputError, match="takes an adapter while it loads a model"):
            open_engine(model, tokenizer, adapter="block")
        assert isinstance(open_engine(model, tokenizer, backend=llama.BACKEND), Engine)
        assert pickle.loads(pickle.dumps(llm)).backend == llama.BACKEND


class CopiesContract:
    """Every public object, opened and used before, is copied and sent, or says why not."""

    names: ClassVar[list[str]]
    """Of the rows: all public ones, and what else is sent."""

    def test_every_public_name_has_a_row(self, rows: dict[str, Row]) -> None:
        assert sorted(rows) == sorted(self.names)

    def test_it_is_copied_and_pickled_or_says_why_not(self, rows: dict[str, Row]) -> None:
        from sending import check_here

        for row in rows.values():
            check_here(row)

    def test_in_another_process_it_answers_the_same(self, rows: dict[str, Row]) -> None:
        from sending import check_elsewhere

        check_elsewhere(rows)
