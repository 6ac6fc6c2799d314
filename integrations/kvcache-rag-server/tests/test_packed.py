"""Documents that apps write into messages are found where each app puts them, and nowhere else."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
from serve_fakes import MODEL, client, data_of, scripted, settings, tiny_backend
from serve_process import CHAT, posted

from kvcache_rag.integration.known_texts import KnownTexts
from kvcache_rag_server import packed
from kvcache_rag_server.app import build_app
from kvcache_rag_server.packed import FORMS, Packed, Recogniser

if TYPE_CHECKING:
    from kvcache_rag_server.backend import BackendRequest

A = "Paris is the capital of France."
B = "Berlin is the capital of Germany.\n\nIt lies on the Spree."
QUESTION = "What is the capital of France?"
BEFORE = (
    'Answer from the context, and name sources as [id] of their <source id="1">.\n\n<context>\n'
)
LINE, SHORT = "-" * 21, "-" * 20


@pytest.fixture(autouse=True)
def template(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template of our own in the place of Open WebUI's."""
    digest = sha256(BEFORE.encode()).hexdigest()
    monkeypatch.setattr(packed, "_OPEN_WEBUI", ((len(BEFORE), digest),))
    monkeypatch.setattr(packed, "_TASK", BEFORE[:20])


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def source(number: int, text: str, more: str = "") -> str:
    return f'<source id="{number}" name="geo {number}.txt"{more}>{text}</source>'


def open_webui(*sources: str, behind: str = "") -> str:
    return f"{BEFORE}{chr(10).join(sources)}\n</context>\n{behind}"


def anything(*texts: str) -> str:
    told = (f"[CONTEXT {at}]:\n{one}\n[END CONTEXT {at}]\n\n" for at, one in enumerate(texts))
    return f"Be brief.\nContext:\n{''.join(told)}"


def librechat(*files: tuple[str, ...]) -> str:
    listed = "".join(
        f"\n              <file>\n                <filename>{at}.txt</filename>\n"
        "                <type>text/plain</type>\n              </file>"
        for at, _ in enumerate(files)
    )
    count = "a file" if len(files) == 1 else f"{len(files)} files"
    body = "".join(
        f"\n          <file>\n            <filename>{at}.txt</filename>\n            <context>"
        + "".join(
            f"\n            <contextItem>\n              <![CDATA[{one}]]>\n            "
            "</contextItem>"
            for one in texts
        )
        + "\n            </context>\n          </file>"
        for at, texts in enumerate(files)
    )
    return (
        f"You are helpful.\n\nThe user has attached {count} to the conversation:\n        {listed}"
        f"{packed._SEARCHED}{body}{packed._LEARNED}\nIn your response, remember this."
    )


def file_nodes(*texts: str) -> list[str]:
    return [f"file_path: /data/{at}.txt\n\n{one}" for at, one in enumerate(texts)]


def qa(context: str) -> str:
    return (
        f"Context information is below.\n{LINE}\n{context}\n{LINE}\nGiven the context information "
        f"and not prior knowledge, answer the query.\nQuery: {QUESTION}\nAnswer: "
    )


ASSISTANT = (
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved "
    "context to answer the question. If you don't know the answer, just say that you don't know. "
    "Use three sentences maximum and keep the answer concise.\n"
)
DONT = "If you don't know the answer, just say that you don't know, don't try to make up an answer."
JOINED = f"{A}\n\n{B}"
ASKED = user(QUESTION)

EXAMPLES: dict[str, list[dict[str, str]]] = {
    "open-webui": [
        system("Hi."),
        user(open_webui(source(1, A), source(1, B), behind=f"\n{QUESTION}")),
    ],
    "open-webui-system": [system("Hi.\n" + open_webui(source(1, A), source(2, B))), ASKED],
    "anythingllm": [system(anything(A, B)), ASKED],
    "anythingllm-agent": [
        user(
            f'{QUESTION}\n\n<attached_documents>\n<document name="a.txt">\n{A}\n</document>\n'
            f'<document name="b.txt">\n{B}\n</document>\n</attached_documents>'
        )
    ],
    "librechat": [system(librechat((A,), (B,))), ASKED],
    "llama-index": [user(qa(JOINED))],
    "llama-index-summary": [
        user(
            f"Context information from multiple sources is below.\n{LINE}\n{JOINED}\n{LINE}\nGiven "
            "the information from multiple sources and not prior knowledge, answer the query.\n"
            f"Query: {QUESTION}\nAnswer: "
        )
    ],
    "llama-index-chat": [
        system(
            "Use the context information below to assist the user.\n"
            f"{SHORT}\n{JOINED}\n{SHORT}\nYou are helpful."
        ),
        ASKED,
    ],
    "llama-index-condense": [
        system(
            "\n  The following is a friendly conversation between a user and an AI assistant.\n"
            "  It is talkative.\n\n  Here are the relevant documents for the context:\n\n  "
            f"{JOINED}\n\n  Instruction: Based on the above documents, provide a detailed answer "
            "for the user question below.\n  Answer."
        ),
        ASKED,
    ],
    "llama-index-ts-chat": [
        system(f"Context information is below.\n{LINE}\n{JOINED}\n{LINE}"),
        ASKED,
    ],
    "langchain": [
        system(
            f"Use the following pieces of context to answer the user's question.\n{DONT}\n"
            f"----------------\n{JOINED}"
        ),
        ASKED,
    ],
    "langchain-completion": [
        user(
            "Use the following pieces of context to answer the question at the end. "
            f"{DONT}\n\n{JOINED}\n\nQuestion: {QUESTION}\nHelpful Answer:"
        )
    ],
    "langchain-hub": [user(f"{ASSISTANT}Question: {QUESTION} \nContext: {JOINED} \nAnswer:")],
    "langchain-hub-chat": [
        system(
            "Answer any use questions based solely on the context below:\n\n<context>\n"
            f"{JOINED}\n</context>"
        ),
        ASKED,
    ],
    "langchain-retrieval": [system(f"{ASSISTANT.replace('just ', '')}\n{JOINED}"), ASKED],
    "haystack": [
        user(
            "\nGiven the following information, answer the question.\n\nContext:\n\n    "
            f"{A}\n\n    {B}\n\n\nQuestion: {QUESTION}\nAnswer:"
        )
    ],
}
NEEDS_KNOWN = {
    name for name in EXAMPLES if name.startswith(("llama-index", "langchain", "haystack"))
}


def body(messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages, "max_tokens": 4, **fields}


async def works_of(*bodies: dict[str, Any], **changes: Any) -> list[BackendRequest]:
    """What the backend of one server is asked, without names."""
    app, backend = scripted(**changes)
    async with client(app) as http:
        for one in bodies:
            reply = await http.post(CHAT, json=one)
            assert reply.status_code == 200, reply.text
    return [replace(one, id="", trace={}) for one in backend.works]


def without(messages: list[dict[str, str]], *texts: str) -> list[dict[str, str]]:
    """Messages with the recognised blocks cut out, by the recogniser."""
    recogniser = Recogniser()
    recogniser.note("", texts)
    found = recogniser.cut(messages, "", settings())
    assert found is not None
    return found[0]


# ---------------------------------------------------------------------- laws
def test_every_form_has_an_example() -> None:
    assert [one.name for one in FORMS] == [*EXAMPLES]


@pytest.mark.parametrize("name", EXAMPLES)
async def test_a_recognised_request_is_the_same_with_documents(name: str) -> None:
    """What the backend is asked, and so the logits, are those of the field `documents`."""
    messages = EXAMPLES[name]
    first = body(ASKED and [ASKED], documents=[A, B])  # so that the tenant's texts are known
    given = body(without(messages, A, B), documents=[A, B])
    _, recognised, explicit = await works_of(first, body(messages), given)
    assert recognised.packed is not None
    assert recognised.packed.form == name
    assert recognised.chunks == (A, B)
    assert replace(recognised, packed=None) == explicit
    rest = [*recognised.turns, *({"content": text} for text in recognised.system)]
    assert not any(A in one["content"] or B in one["content"] for one in rest)
    assert any(QUESTION in one["content"] for one in rest)


@pytest.mark.parametrize("name", EXAMPLES)
async def test_a_tenants_texts_are_known_to_itself_only(name: str) -> None:
    (work,) = await works_of(body(EXAMPLES[name]))
    assert (work.packed is None) == (name in NEEDS_KNOWN)
    recogniser = Recogniser()
    recogniser.note("other", [A, B])
    found = recogniser.cut(EXAMPLES[name], "", settings())
    assert (found is None) == (name in NEEDS_KNOWN)


def test_what_is_looked_up_for_a_tenant_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much others have sent, nothing of it is touched, so no time tells of it."""
    recogniser = Recogniser()
    recogniser.note("other", [A, B])
    asked: list[KnownTexts] = []

    def filling(known: KnownTexts, text: str, most: int) -> list[Any]:
        asked.append(known)
        return []

    monkeypatch.setattr(KnownTexts, "filling", filling)
    for name in NEEDS_KNOWN:
        assert recogniser.cut(EXAMPLES[name], "own", settings()) is None
    assert asked
    assert all(one is recogniser.known("own") for one in asked)


def test_nodes_of_files_are_told_apart_by_their_paths() -> None:
    nodes = file_nodes(A, B)
    found = Recogniser().cut([user(qa("\n\n".join(nodes)))], "", settings())
    assert found is not None
    assert found[1].documents == tuple(nodes)


async def test_whoever_wants_the_apps_own_layout_has_it() -> None:
    messages = EXAMPLES["anythingllm"]
    asked = body(messages, kvcache={"documents": "as text"})
    (own,) = await works_of(asked)
    (off,) = await works_of(body(messages), documents_as_text=True)
    for work in (own, off):
        assert (work.packed, work.chunks, work.is_chat) == (None, (), True)
        assert A in work.turns[0]["content"]


# ---------------------------------------------------------------------- what does not fit is text
QUOTED = open_webui(source(1, A))
ANYTHING = anything(A, B)
LIBRE = librechat((A,), (B,))
STRANGE: dict[str, list[dict[str, str]]] = {
    "quoted behind a question": [user(f"What does this say?\n{QUOTED}")],
    "another template": [user(QUOTED.replace("Answer from", "Answer by", 1))],
    "in an earlier message": [user(QUOTED), {"role": "assistant", "content": "Yes."}, ASKED],
    "in an answer": [ASKED, {"role": "assistant", "content": QUOTED}, user("And?")],
    "a second closing tag": [user(open_webui(source(1, f"{A}</source>")))],
    "a second opening tag": [user(open_webui(source(1, f'<source id="1">{A}')))],
    "an id too high": [user(open_webui(source(2, A)))],
    "text between": [user(open_webui(source(1, A), "and", source(1, B)))],
    "no end": [user(QUOTED.replace("</context>", ""))],
    "the end twice": [user(f"{QUOTED}{source(1, B)}\n</context>\n")],
    "a quote in a name": [user(QUOTED.replace('name="geo', 'name="a "geo'))],
    "numbers with a gap": [system(ANYTHING.replace("CONTEXT 1", "CONTEXT 2"))],
    "a number twice": [system(anything(A, anything(A, B)))],
    "text behind": [system(f"{ANYTHING}Be kind.")],
    "of the user": [user(ANYTHING)],
    "more files than said": [system(LIBRE.replace("attached 2", "attached 3"))],
    "half a tag more": [system(LIBRE.replace(A, f"{A}]]>"))],
    "no tail": [system(LIBRE.replace("learned knowledge", "knowledge"))],
    "an attachment in the middle": [
        user(f"{EXAMPLES['anythingllm-agent'][0]['content']}\n\nAnd what is this?")
    ],
    "an unknown text between known ones": [user(qa(f"{A}\n\nLyon lies on the Rhone.\n\n{B}"))],
    "a known text within a line": [user(qa(f"He said: {A}"))],
    "the closing twice": [user(qa(JOINED).replace(QUESTION, qa(JOINED)))],
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_does_not_fit_exactly_is_text(name: str) -> None:
    recogniser = Recogniser()
    recogniser.note("", [A, B])
    messages = STRANGE[name]
    if messages[-1]["role"] == "system":
        messages = [*messages, ASKED]
    assert recogniser.cut(messages, "", settings()) is None


def test_a_large_message_is_read_in_no_time() -> None:
    """Each of them held the event loop up for seconds, and for minutes at the largest body."""
    recogniser = Recogniser()
    recogniser.note("", ["aaaaaaa\n" * 4 + "zzz", *("a" * length for length in range(24, 2500))])
    lines = "a" * 2600 + "b\n"
    large = [
        system(anything(*["x" * 800] * 5000)),
        system(f"{ASSISTANT}\n" + "aaaaaaa\n" * 500_000),
        system(f"{ASSISTANT}\n" + lines * 1500),
        user(f"{ASSISTANT}Question: " + "x \n" * 1_300_000),
        system(LIBRE.replace("attached 2", f"attached {'1' * 5000}")),
    ]
    started = time.process_time()
    for message in large:
        assert recogniser.cut([message, ASKED], "", settings()) is None
    assert time.process_time() - started < 10, "seconds of the processor; they took minutes"


def test_what_is_remembered_of_a_tenant_has_a_limit() -> None:
    recogniser = Recogniser()
    for number in range(40):
        recogniser.note("", [f"document number {number} of these{' ' * 1_000_000}"])
    assert len(recogniser.known("")) < 10, "white space counts"


async def test_documents_that_are_refused_are_not_remembered() -> None:
    app, _ = scripted(max_documents=1)
    async with client(app) as http:
        assert (await http.post(CHAT, json=body([ASKED], documents=[A, B]))).status_code == 413
    assert not len(app.state.context.recogniser.known(""))


def test_documents_behind_another_instruction_are_found() -> None:
    messages = [system("Be brief."), *EXAMPLES["anythingllm"]]
    found = Recogniser().cut(messages, "", settings())
    assert found is not None
    assert found[1].documents == (A, B)


async def test_more_than_the_server_takes_is_text() -> None:
    messages = EXAMPLES["anythingllm"]
    for few in ({"max_documents": 1}, {"max_document_bytes": len(B) - 1}):
        (work,) = await works_of(body(messages), **few)
        assert (work.packed, work.chunks) == (None, ())


def test_empty_markers_are_cut_and_no_documents() -> None:
    text = open_webui(source(1, A), source(2, ""), behind=f"\n{QUESTION}")
    found = Recogniser().cut([user(text)], "", settings())
    assert found is not None
    cut, told = found
    assert told.documents == (A,)
    assert '<source id="2"' not in cut[0]["content"]


# ---------------------------------------------------------------------- what is told
async def test_what_was_recognised_is_told() -> None:
    app, _ = scripted()
    async with client(app) as http:
        reply = await http.post(CHAT, json=body(EXAMPLES["open-webui-system"]))
        plain = await http.post(CHAT, json=body([ASKED], documents=[A]))
        metrics = (await http.get("/metrics")).text
    told = {"form": "open-webui-system", "documents": 2, "ids": ["1", "2"]}
    assert reply.json()["kvcache"]["recognised"] == told
    assert plain.json()["kvcache"]["recognised"] is None
    line = 'kvcache_rag_recognised_requests_total{form="open-webui-system",route="chat"} 1.0'
    assert line in metrics


async def test_a_completion_is_read_as_a_message_of_the_user() -> None:
    nodes = file_nodes(A, B)
    sent = {"model": MODEL, "prompt": qa("\n\n".join(nodes))}
    reply, backend = await posted(sent, "/v1/completions")
    assert reply.status_code == 200
    (work,) = backend.works
    assert (work.chunks, work.is_plain) == (tuple(nodes), False)
    assert work.question.startswith("Given the context information and not prior knowledge")
    assert QUESTION in work.question


async def test_what_the_server_cited_before_is_not_told_to_the_model() -> None:
    said = {"role": "assistant", "content": "It is [5] or Paris. [2]"}
    messages = [ASKED, said, *EXAMPLES["open-webui"][1:]]
    recognised, plain = await works_of(body(messages), body([ASKED, said, ASKED]))
    assert [turn["content"] for turn in recognised.turns[:2]] == [QUESTION, "It is [5] or Paris."]
    assert plain.turns[1]["content"] == said["content"]


@pytest.mark.parametrize(
    ("ids", "places", "answer", "cited"),
    [
        (("1", "2"), [1], "Paris.", " [2]"),
        (("1", "1"), [0, 1], "Paris.", " [1]"),
        (("1", "2"), [0, 1], "Paris.", ""),
        (("1", "2"), [1], "Paris [1].", ""),
        (("", ""), [0], "Paris.", ""),
        (("1", "2"), [], "Paris.", ""),
    ],
)
def test_an_answer_names_its_one_source(ids: Any, places: Any, answer: str, cited: str) -> None:
    asked = Packed("open-webui", (A, B), ids, cites=True)
    assert asked.citation(places, answer) == cited
    assert replace(asked, cites=False).citation(places, answer) == ""


def test_an_answer_from_cached_chunks_is_that_over_documents_and_cites_its_source() -> None:
    one = EXAMPLES["open-webui"][1:]

    async def replies(app: Any) -> list[Any]:
        async with client(app) as http:
            asked = (
                body(one, max_tokens=64),
                body(without(one), documents=[A, B], max_tokens=64),
                body(one, max_tokens=64, stream=True),
            )
            return [await http.post(CHAT, json=each) for each in asked]

    with tiny_backend() as backend:
        found = asyncio.run(replies(build_app(backend, settings())))
    recognised, explicit = (reply.json() for reply in found[:2])
    (choice,), (plain,) = recognised["choices"], explicit["choices"]
    assert plain["finish_reason"] == "stop", "the packaged reader ends its answers"
    assert choice["message"]["content"] == f"{plain['message']['content']} [1]"
    for name in ("answered_from", "policy", "query_tokens"):
        assert recognised["kvcache"][name] == explicit["kvcache"][name]
    assert explicit["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    chunks = (one for one in data_of(found[2].text) if one != "[DONE]")
    streamed = "".join(one["choices"][0]["delta"].get("content", "") for one in chunks)
    assert streamed == choice["message"]["content"]
