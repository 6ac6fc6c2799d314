"""Named prompt templates of third-party models trained to read chunks separately."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from kvcache_rag.prompt.template import PromptTemplate

if TYPE_CHECKING:
    import os

# Block-Attention (arXiv 2409.15355), as its public training data write prompts: all of it is one
# turn of the user, each document a block, and the roles are no control tokens.
_BLOCK_ATTENTION: Final = PromptTemplate(
    system="You are an intelligent AI assistant. Please answer questions based on the user's "
    "instructions. Below are some reference documents that may help you in answering the user's "
    "question.\n\n",
    chunk_start="- Title: ",
    chunk_end="\n",
    # Documents and question are joined by a line break: two stand between them.
    question="\nPlease write a high-quality answer for the given question using only the provided "
    "search documents (some of which might be irrelevant).\nQuestion: {question}",
    # Its system turn would take the documents, which models read in the user's.
    chat_template="{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '<|user|>\n' + message.content + '\n' }}{% elif message.role == 'assistant' %}"
    "{{ '<|assistant|>\n' + message.content + eos_token + '\n' }}{% else %}"
    "{{ raise_exception('it has the roles user and assistant alone') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
)

TEMPLATES: Final = {"block-attention": _BLOCK_ATTENTION}
"""Templates by the names under which `template=` takes them."""

# Models that were trained on such prompts, by what they are called in lower case, whoever's copy.
_TRAINED: Final = {
    "tulu3-block-ft": _BLOCK_ATTENTION,
    "llama-3.2-1b-block-ft": _BLOCK_ATTENTION,
}


def template_for_model(name: str | os.PathLike[str]) -> PromptTemplate | None:
    """The template that a model of somebody else was trained with for blocks; None for others.

    Args:
        name: A hub id, or a folder of that name or of the hub's own cache.
    """
    path = PurePath(name)
    hub = path.parent.parent.name.rpartition("--")[2] if path.parent.name == "snapshots" else ""
    return _TRAINED.get((hub or path.name).casefold())
