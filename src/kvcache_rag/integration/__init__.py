"""What every framework's integration needs, such as rows of a Chroma collection that refer to KV.

A vector database holds rows; the chunk store holds their keys and values.  This package keeps the
two in step and knows no framework: texts and metadata come in, references come out.  Names are
loaded on first use, so that only what runs a model loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_rag.errors import check_unicode as check_unicode
    from kvcache_rag.errors import first_problem as first_problem
    from kvcache_rag.errors import refuse_unknown as refuse_unknown
    from kvcache_rag.forks import Reopened as Reopened
    from kvcache_rag.generation.grammar import JsonGrammars as JsonGrammars
    from kvcache_rag.generation.grammar import JsonProcessor as JsonProcessor
    from kvcache_rag.generation.grammar import json_grammar as json_grammar
    from kvcache_rag.generation.grammar import json_instruction as json_instruction
    from kvcache_rag.generation.tools import AnswerPart as AnswerPart
    from kvcache_rag.generation.tools import AnswerReader as AnswerReader
    from kvcache_rag.generation.tools import Reasoning as Reasoning
    from kvcache_rag.generation.tools import ToolCall as ToolCall
    from kvcache_rag.generation.tools import ToolChoice as ToolChoice
    from kvcache_rag.generation.tools import UnreadableCall as UnreadableCall
    from kvcache_rag.generation.tools import read_whole as read_whole
    from kvcache_rag.integration.cache_key import answer_state as answer_state
    from kvcache_rag.integration.cache_key import written as written
    from kvcache_rag.integration.chat import JSON_FORM as JSON_FORM
    from kvcache_rag.integration.chat import ConversationForm as ConversationForm
    from kvcache_rag.integration.chat import ConversationForms as ConversationForms
    from kvcache_rag.integration.chat import reference_to as reference_to
    from kvcache_rag.integration.chat import referring as referring
    from kvcache_rag.integration.chat import whole_texts as whole_texts
    from kvcache_rag.integration.collection import PrefilledCollection as PrefilledCollection
    from kvcache_rag.integration.collection import behind as behind
    from kvcache_rag.integration.collection import listed as listed
    from kvcache_rag.integration.collection import of_user as of_user
    from kvcache_rag.integration.embedding import hash_vector as hash_vector
    from kvcache_rag.integration.engine import open_engine as open_engine
    from kvcache_rag.integration.engine import remote_engine as remote_engine
    from kvcache_rag.integration.known_texts import FoundText as FoundText
    from kvcache_rag.integration.known_texts import KnownTexts as KnownTexts
    from kvcache_rag.integration.known_texts import is_short as is_short
    from kvcache_rag.integration.prefiller import RowPrefiller as RowPrefiller
    from kvcache_rag.integration.prefiller import beside as beside
    from kvcache_rag.integration.prefiller import prefill_texts as prefill_texts
    from kvcache_rag.integration.prefiller import standing as standing
    from kvcache_rag.integration.references import REFERENCE_KEYS as REFERENCE_KEYS
    from kvcache_rag.integration.references import Reference as Reference
    from kvcache_rag.integration.references import References as References
    from kvcache_rag.integration.references import is_remote as is_remote
    from kvcache_rag.integration.references import text_digest as text_digest
    from kvcache_rag.integration.rows import NewRow as NewRow
    from kvcache_rag.integration.rows import Row as Row
    from kvcache_rag.integration.rows import Rows as Rows
    from kvcache_rag.integration.rows import Scalar as Scalar
    from kvcache_rag.integration.rows import Where as Where
    from kvcache_rag.integration.rows import flat as flat
    from kvcache_rag.integration.watch import MetadataWatch as MetadataWatch
    from kvcache_rag.integration.watch import Shown as Shown
    from kvcache_rag.models.adapters import lasting_adapter as lasting_adapter
    from kvcache_rag.models.generate import checked_generation as checked_generation
    from kvcache_rag.models.model_names import check_spelling as check_spelling
    from kvcache_rag.models.model_names import chosen_adapter as chosen_adapter
    from kvcache_rag.models.weight_formats import parameter_count as parameter_count
    from kvcache_rag.policies.policy_registry import given_policy as given_policy
    from kvcache_rag.progress import dimmed as dimmed
    from kvcache_rag.progress import is_rich as is_rich
    from kvcache_rag.progress import plain as plain
    from kvcache_rag.progress import table as table
    from kvcache_rag.prompt.conversation import Turn as Turn
    from kvcache_rag.prompt.conversation import foreign_instructions as foreign_instructions
    from kvcache_rag.prompt.conversation import instructed as instructed
    from kvcache_rag.prompt.conversation import joined as joined
    from kvcache_rag.prompt.conversation import opened as opened
    from kvcache_rag.prompt.conversation import rendered as rendered
    from kvcache_rag.prompt.conversation import said as said
    from kvcache_rag.prompt.scores import scores_by_step as scores_by_step
    from kvcache_rag.prompt.scores import whole_scores as whole_scores
    from kvcache_rag.settings import DeviceOption as DeviceOption
    from kvcache_rag.settings import EngineOptions as EngineOptions
    from kvcache_rag.settings import PathText as PathText
    from kvcache_rag.settings import StoreOptions as StoreOptions
    from kvcache_rag.settings import said_options as said_options
    from kvcache_rag.stores.filesystem import private_folder as private_folder
else:
    from kvcache_rag.exports import lazy_names

    # What 0.2 had here, and which package has it.
    _ELSEWHERE = {
        "kvcache_rag_documents": "FileText FolderTexts LeftOut extract_text left_out_lines"
        " read_file read_folder suffixes without_lines",
    }
    __getattr__, __dir__ = lazy_names(__name__, elsewhere=_ELSEWHERE)
