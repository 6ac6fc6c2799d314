"""Documents that apps write into messages, found where each app puts them and cut out.

Each form is a row of `FORMS`: the app and its versions, in which message its documents stand, what
stands around them, and how they are told apart.  A message that does not fit a form exactly stays
a text.  No app escapes its documents: where one holds the form's own delimiters, the counts do not
agree and nothing is recognised, or, of delimiters without numbers, it is read as two; what the
model reads are the same characters all the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Literal, Protocol

from cachetools import LRUCache

from kvcache_rag.integration.known_texts import KnownTexts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kvcache_rag.prompt.conversation import Turn
    from kvcache_rag_server.settings import RequestLimits

_TENANTS: Final = 64
_CHARACTERS: Final = 1 << 23  # of the texts that are known of one tenant


@dataclass(frozen=True)
class Cut:
    """A part of a message that packs documents.

    Attributes:
        start: Index of the first character that is cut out: what only frames the documents goes
            with them, as a frame around nothing misleads a model.
        end: Index behind the last one.
        documents: Each with its id as the app has it in this request, "" for none.
    """

    start: int
    end: int
    documents: tuple[tuple[str, str], ...]


class Reading(Protocol):
    """Finds the documents of one form in a message."""

    def __call__(self, content: str, known: KnownTexts, most: int) -> Cut | None:
        """What is cut out of it; None where the form does not fit.

        Args:
            content: Of the message.
            known: Texts of documents that the tenant has sent.
            most: Documents that there may be; where counting costs more with each, no more are
                counted.
        """


@dataclass(frozen=True)
class PackedForm:
    """How one app packs documents.

    Attributes:
        name: Told in answers and metrics.
        app: Whose form it is, and of which versions.
        source: Where the app's public code writes it.
        role: Of the message: a system message, or the last one of the user.
        read: Finds the documents.
        cites: Whether the app asks the model to cite a document as `[id]`.
    """

    name: str
    app: str
    source: str
    role: Literal["system", "user"]
    read: Reading
    cites: bool = False


@dataclass(frozen=True)
class Packed:
    """What was recognised in a request.

    Attributes:
        form: Name of the form.
        documents: Texts, in the app's order, which is best first.
        ids: Of the documents, as the app calls them; "" of one without.
        cites: Whether the app asks for citations.
    """

    form: str
    documents: tuple[str, ...]
    ids: tuple[str, ...] = ()
    cites: bool = False

    def citation(self, places: Iterable[int], answer: str) -> str:
        """What an answer needs to name the one source that it was computed from; "" for nothing.

        Args:
            places: Numbers of the documents that it was computed from.
            answer: Its text, which may have a citation of its own.
        """
        ids = {self.ids[at] for at in places}
        if not self.cites or len(ids) != 1 or "" in ids or re.search(r"\[\d+\]", answer):
            return ""
        return f" [{ids.pop()}]"


# ---------------------------------------------------------------------- Open WebUI
# The default template up to the documents: its length and digest.
_OPEN_WEBUI: Final = ((1422, "c6a45a2f06c86c04e01324b9c0ee68026b248836fdede13fdde296b1cda0fa17"),)
_TASK: Final = "### Task:\n"  # what it begins with
_SOURCE: Final = re.compile(r'<source id="(\d{1,6})"(?: [a-zA-Z_][\w.-]*="[^"<>\n]*")*>', re.ASCII)
_SOURCE_END: Final = "</source>"


_ASKED_TWICE: Final = re.compile(r"\n<user_query>\n.*?\n</user_query>\n", re.DOTALL)


def _open_webui(content: str, begin: int) -> Cut | None:
    """Documents in a default template that begins at an index."""
    for length, digest in _OPEN_WEBUI:
        start = begin + length
        if sha256(content[begin:start].encode()).hexdigest() == digest:
            break
    else:
        return None
    closing = f"{_SOURCE_END}\n</context>\n"
    if content.count(closing, start) != 1:
        return None
    end = content.index(closing, start) + len(_SOURCE_END)
    documents = _tagged(content, start, end, _SOURCE, _SOURCE_END, '<source id="')
    if documents is None:
        return None
    highest = 0
    for _, number in documents:
        if not 1 <= int(number) <= highest + 1:
            return None
        highest = max(highest, int(number))
    end += len(closing) - len(_SOURCE_END)
    twice = _ASKED_TWICE.match(content, end)
    return Cut(begin, end if twice is None else twice.end(), documents)


def _tagged(
    content: str, start: int, end: int, opening: re.Pattern[str], closing: str, counted: str
) -> tuple[tuple[str, str], ...] | None:
    """Documents between tags, each on lines of its own, that fill a range.

    Args:
        content: Of the message.
        start: Where the range begins.
        end: Where it ends.
        opening: The tag before a document; its group, if it has one, is the document's id.
        closing: What stands behind one.
        counted: What must not stand anywhere else.
    """
    found: list[tuple[str, str]] = []
    at = start
    while at < end:
        begun = opening.match(content, at)
        closed = -1 if begun is None else content.find(closing, begun.end(), end)
        if begun is None or closed < 0:
            return None
        found.append((content[begun.end() : closed], begun[1] if opening.groups else ""))
        at = closed + len(closing)
        if at < end and content[at] != "\n":
            return None
        at += 1
    return tuple(found) if content.count(counted, start, end) == len(found) else None


def _open_webui_user(content: str, known: KnownTexts, most: int) -> Cut | None:
    return _open_webui(content, 0)


def _open_webui_system(content: str, known: KnownTexts, most: int) -> Cut | None:
    """At the head of the message, or behind what stood in it, at its tail."""
    if content.startswith(_TASK):
        return _open_webui(content, 0)
    if not content.endswith("</source>\n</context>\n"):
        return None
    at = content.find(f"\n{_TASK}")
    return None if at < 0 else _open_webui(content, at + 1)


# ---------------------------------------------------------------------- AnythingLLM
def _anything_llm(content: str, known: KnownTexts, most: int) -> Cut | None:
    """`[CONTEXT 0]: …`, numbered, so that what fits can be read in one way only."""
    last = re.search(r"\n\[END CONTEXT (\d{1,4})\]\n\n\Z", content)
    if last is None:
        return None
    count = int(last[1]) + 1
    if count > most:
        return None
    openings = [f"[CONTEXT {at}]:\n" for at in range(count)]
    closings = [f"\n[END CONTEXT {at}]\n\n" for at in range(count)]
    first = f"\nContext:\n{openings[0]}"
    between = [f"{one}{other}" for one, other in zip(closings, openings[1:], strict=False)]
    delimiters = (first, *between, closings[-1])
    if any(content.count(one) != 1 for one in delimiters):
        return None
    places = [content.index(one) for one in delimiters]
    if places != sorted(places):
        return None
    begins = [place + len(one) for place, one in zip(places, delimiters, strict=True)]
    texts = (content[at:end] for at, end in zip(begins, places[1:], strict=False))
    return Cut(places[0], len(content), tuple((text, "") for text in texts))


def _anything_llm_agent(content: str, known: KnownTexts, most: int) -> Cut | None:
    opening, closing = "\n\n<attached_documents>\n", "\n</attached_documents>"
    if content.count(opening) != 1 or not content.endswith(closing):
        return None
    at, end = content.index(opening), len(content) - len(closing)
    named = re.compile(r'<document name="[^"\n]*">\n')
    tag = '<document name="'
    documents = _tagged(content, at + len(opening), end, named, "\n</document>", tag)
    return None if documents is None else Cut(at, len(content), documents)


# ---------------------------------------------------------------------- LibreChat
_SEARCHED: Final = (
    "\n\n        A semantic search was executed with the user's message as the query, retrieving "
    "the following context inside <context></context> XML tags.\n\n        <context>"
)
_LEARNED: Final = (
    "\n        </context>\n\n        Use the context as your learned knowledge to better answer "
    "the user.\n"
)
_ATTACHED: Final = re.compile(r"The user has attached (a|[0-9]{1,6}) files? to the conversation:\n")
_FILE: Final = re.compile(
    r"\n          <file>\n            <filename>[^\n]*</filename>\n            <context>"
)
_FILE_END: Final = "\n            </context>\n          </file>"
_ITEM: Final = "\n            <contextItem>\n              <![CDATA["
_ITEM_END: Final = "]]>\n            </contextItem>"


def _librechat(content: str, known: KnownTexts, most: int) -> Cut | None:
    if content.count(_SEARCHED) != 1 or content.count(_LEARNED) != 1:
        return None
    head = _ATTACHED.search(content)
    start, end = content.index(_SEARCHED) + len(_SEARCHED), content.index(_LEARNED)
    if head is None or not head.end() <= start <= end:
        return None
    found: list[tuple[str, str]] = []
    at, files = start, 0
    while at < end:
        named = _FILE.match(content, at)
        if named is None:
            return None
        files, at = files + 1, named.end()
        while content.startswith(_ITEM, at):
            closed = content.find(_ITEM_END, at, end)
            if closed < 0:
                return None
            found.append((content[at + len(_ITEM) : closed], ""))
            at = closed + len(_ITEM_END)
        if not content.startswith(_FILE_END, at):
            return None
        at += len(_FILE_END)
    counts = {content.count(one, start, end) for one in ("<![CDATA[", "]]>")}
    if counts != {len(found)} or files != (1 if head[1] == "a" else int(head[1])):
        return None
    return Cut(head.start(), end + len(_LEARNED), tuple(found))


# ---------------------------------------------------------------------- joined by blank lines
def _joined(
    before: str, opening: str, closing: str = "", *, until: str = "", is_open: bool = False
) -> Reading:
    """Reads a context that is documents joined by white space.

    Where one ends cannot be told from the text, so it has to consist of texts that the tenant has
    sent before, in `documents` or to be prefilled; or, as LlamaIndex writes the nodes of files,
    each has to begin with a line that says its path.

    Args:
        before: Pattern of what the message begins with, which stays.
        opening: Pattern of what stands between that and the context; it is cut out, too.
        closing: What stands behind the context, once; "" for the message's end.
        until: Where `before` is followed by what the user says, the first text behind that, which
            is cut out with the context.
        is_open: Whether `closing` says something beside the context, and stays.
    """
    begins = re.compile(f"({before}){opening}", re.DOTALL)

    def read(content: str, known: KnownTexts, most: int) -> Cut | None:
        begun = begins.match(content)
        if begun is None:
            return None
        frame, start, end = begun.end(1), begun.end(), len(content)
        if until:
            frame = content.find(until, start)
            if frame < 0:
                return None
            start = frame + len(until)
        if closing:
            if content.count(closing, start) != 1:
                return None
            end = content.index(closing, start)
        context = content[start:end]
        texts = _by_paths(context) or _of_known(context, known, most)
        if texts is None:
            return None
        behind = end if is_open else end + len(closing)
        return Cut(frame, behind, tuple((text, "") for text in texts))

    return read


_PATH: Final = re.compile(r"(?:\A|\n\n)(?=(?:page_label: [^\n]*\n)?file_path: [^\n]*\n\n)")


def _by_paths(context: str) -> list[str] | None:
    cuts = [found.end() for found in _PATH.finditer(context)]
    if not cuts or cuts[0] != 0:
        return None
    ends = [*cuts[1:], len(context)]
    return [context[at:behind].strip() for at, behind in zip(cuts, ends, strict=True)]


def _of_known(context: str, known: KnownTexts, most: int) -> list[str] | None:
    return [one.text for one in known.filling(context, most)] or None


_E: Callable[[str], str] = re.escape
_LINE: Final = "-" * 21
_SHORT: Final = "-" * 20
_CLASSIC: Final = (
    r"Use the following pieces of context to answer the user'?s question\. ?\n"
    + _E("If you don't know the answer, just say that you don't know, don't try to make up an ")
    + _E("answer.\n")
)
_CONCISE: Final = (
    _E(
        "You are an assistant for question-answering tasks. Use the following pieces of retrieved "
        "context to answer the question. If you don't know the answer, "
    )
    + "(?:just )?"
    + _E("say that you don't know. Use three sentences maximum and keep the answer concise.\n")
)
_COMPLETED: Final = _E(
    "Use the following pieces of context to answer the question at the end. If you don't know the "
    "answer, just say that you don't know, don't try to make up an answer.\n\n"
)
_CONDENSED: Final = (
    "\n\n  Instruction: Based on the above documents, provide a detailed answer for the user "
    "question below.\n"
)

FORMS: Final = (
    PackedForm(
        "open-webui",
        "Open WebUI 0.6.31 to 0.12.4, its default template",
        "backend/open_webui/utils/middleware.py, apply_source_context_to_messages",
        "user",
        _open_webui_user,
        cites=True,
    ),
    PackedForm(
        "open-webui-system",
        "Open WebUI with RAG_SYSTEM_CONTEXT, or 0.6.1 to 0.6.30",
        "backend/open_webui/utils/middleware.py, apply_source_context_to_messages",
        "system",
        _open_webui_system,
        cites=True,
    ),
    PackedForm(
        "anythingllm",
        "AnythingLLM 1.0 to 1.16",
        "server/utils/AiProviders/genericOpenAi/index.js, appendContext",
        "system",
        _anything_llm,
    ),
    PackedForm(
        "anythingllm-agent",
        "AnythingLLM 1.12 to 1.16, files of an agent's chat",
        "server/utils/agents/index.js, fetchParsedFileContext",
        "user",
        _anything_llm_agent,
    ),
    PackedForm(
        "librechat",
        "LibreChat 0.7.3 to 0.8.7, files over its RAG API",
        "api/app/clients/prompts/createContextHandlers.js, createContext",
        "system",
        _librechat,
    ),
    PackedForm(
        "llama-index",
        "LlamaIndex 0.10 to 0.14 and LlamaIndex.TS, query engines",
        "llama_index/core/prompts/chat_prompts.py, CHAT_TEXT_QA_PROMPT",
        "user",
        _joined("", _E(f"Context information is below.\n{_LINE}\n"), f"\n{_LINE}\n"),
    ),
    PackedForm(
        "llama-index-summary",
        "LlamaIndex 0.10 to 0.14, tree_summarize",
        "llama_index/core/prompts/chat_prompts.py, CHAT_TREE_SUMMARIZE_PROMPT",
        "user",
        _joined(
            "",
            _E(f"Context information from multiple sources is below.\n{_LINE}\n"),
            f"\n{_LINE}\n",
        ),
    ),
    PackedForm(
        "llama-index-chat",
        "LlamaIndex 0.11 to 0.14, chat_mode=context",
        "llama_index/core/chat_engine/context.py, DEFAULT_CONTEXT_TEMPLATE",
        "system",
        _joined(
            "",
            _E(f"Use the context information below to assist the user.\n{_SHORT}\n"),
            f"\n{_SHORT}\n",
        ),
    ),
    PackedForm(
        "llama-index-condense",
        "LlamaIndex 0.11 to 0.14, chat_mode=condense_plus_context",
        "llama_index/core/chat_engine/condense_plus_context.py, DEFAULT_CONTEXT_PROMPT_TEMPLATE",
        "system",
        _joined(
            r"\n  The following is a friendly conversation between a user and an AI assistant\.\n"
            r".{0,400}?\n",
            r"  Here are the relevant documents for the context:\n\n  ",
            _CONDENSED,
            is_open=True,
        ),
    ),
    PackedForm(
        "llama-index-ts-chat",
        "LlamaIndex.TS 0.6, ContextChatEngine",
        "packages/core/src/chat-engine/default-context-generator.ts",
        "system",
        _joined("", _E(f"Context information is below.\n{_LINE}\n"), f"\n{_LINE}"),
    ),
    PackedForm(
        "langchain",
        "LangChain, RetrievalQA and its like over a chat model (Python and JS)",
        "langchain_classic/chains/question_answering/stuff_prompt.py",
        "system",
        _joined(_CLASSIC, r"----------------\n"),
    ),
    PackedForm(
        "langchain-completion",
        "LangChain, RetrievalQA and its like over a completing model (Python and JS)",
        "langchain_classic/chains/question_answering/stuff_prompt.py",
        "user",
        _joined(_COMPLETED, "", "\n\nQuestion: ", is_open=True),
    ),
    PackedForm(
        "langchain-hub",
        "LangChain, the hub's rlm/rag-prompt",
        "rlm/rag-prompt, commit 50442af1",
        "user",
        _joined(_CONCISE + "Question: ", "", " \nAnswer:", until=" \nContext: ", is_open=True),
    ),
    PackedForm(
        "langchain-hub-chat",
        "LangChain, the hub's langchain-ai/retrieval-qa-chat",
        "langchain-ai/retrieval-qa-chat, commit b60afb62",
        "system",
        _joined(
            _E("Answer any use questions based solely on the context below:\n"),
            r"\n<context>\n",
            "\n</context>",
        ),
    ),
    PackedForm(
        "langchain-retrieval",
        "LangChain, create_retrieval_chain as documented, and the 1.x tutorial (Python and JS)",
        "docs: src/oss/langchain/rag.mdx",
        "system",
        _joined(
            f"(?:{_CONCISE}|"
            + _E("You are a helpful assistant. Use the following context in your response:\n")
            + r")",
            r"\n",
        ),
    ),
    PackedForm(
        "haystack",
        "Haystack 2 and 3, the template of tutorial 27",
        "haystack-tutorials: tutorials/27_First_RAG_Pipeline.ipynb",
        "user",
        _joined(
            _E("\nGiven the following information, answer the question.\n"),
            r"\nContext:\n",
            "\n\nQuestion: ",
            is_open=True,
        ),
    ),
)


# ---------------------------------------------------------------------- recognising
def within(limits: RequestLimits, texts: Collection[str]) -> bool:
    """Whether a request may have these documents."""
    return len(texts) <= limits.max_documents and all(
        len(text.encode("utf-8", "replace")) <= limits.max_document_bytes for text in texts
    )


@dataclass
class Recogniser:
    """Finds packed documents in requests, and knows what each tenant has sent as documents.

    Used in one event loop.  What a tenant has sent says nothing of what another one's requests are
    read as.
    """

    _known: LRUCache[str, KnownTexts] = field(default_factory=lambda: LRUCache(_TENANTS))

    def known(self, namespace: str) -> KnownTexts:
        """Texts of documents of one tenant."""
        found = self._known.get(namespace)
        if found is None:
            found = self._known[namespace] = KnownTexts(_CHARACTERS)
        return found

    def note(self, namespace: str, texts: Iterable[str]) -> None:
        """Remember texts that a tenant sent as documents."""
        known = self.known(namespace)
        for text in texts:
            known.note(text)

    def cut(
        self, turns: Sequence[Turn], namespace: str, limits: RequestLimits
    ) -> tuple[list[Turn], Packed] | None:
        """Turns without the documents in them, and those; None where no form fits.

        Args:
            turns: Oldest first.
            namespace: The tenant's.
            limits: Of documents; a message with more or longer ones stays a text.
        """
        system = [at for at, turn in enumerate(turns) if turn["role"] == "system"]
        user = [at for at, turn in enumerate(turns) if turn["role"] == "user"]
        places = {"system": system[::-1], "user": user[-1:]}
        known, most = self.known(namespace), limits.max_documents
        for form, at in [(one, place) for one in FORMS for place in places[one.role]]:
            content = turns[at]["content"]
            found = form.read(content, known, most)
            if found is None:
                continue
            told = [(text, id) for text, id in found.documents if text.strip()]
            texts, ids = tuple(text for text, _ in told), tuple(id for _, id in told)
            rest = content[: found.start] + content[found.end :]
            if not texts or not within(limits, texts) or (form.role == "user" and not rest.strip()):
                return None
            self.note(namespace, texts)
            cut = [*turns[:at], {**turns[at], "content": rest.strip("\n")}, *turns[at + 1 :]]
            if form.cites:
                cut = [_uncited(turn) for turn in cut]
            return cut, Packed(form.name, texts, ids, form.cites)
        return None


def _uncited(turn: Turn) -> Turn:
    """A turn without the citation behind an earlier answer.

    The model would write numbers like it, which name whatever comes to its mind: it sees no ids.
    """
    if turn["role"] != "assistant":
        return turn
    return {**turn, "content": re.sub(r" \[\d+\]\Z", "", turn["content"])}
