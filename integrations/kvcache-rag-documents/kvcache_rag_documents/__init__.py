"""The text of files and folders as people see it, and a list of what is not text.

JustHTML parses HTML as browsers do, mammoth first turns Word into HTML, pypdf reads PDF, and PyYAML
front matter.  All but the last are in the extra `documents` of kvcache-rag and imported when a file
needs them.
"""

from kvcache_rag_documents.extraction import (
    FolderTexts,
    LeftOut,
    extract_text,
    left_out_lines,
    read_file,
    read_folder,
    suffixes,
    without_lines,
)
from kvcache_rag_documents.text import FileText

__all__ = [
    "FileText",
    "FolderTexts",
    "LeftOut",
    "extract_text",
    "left_out_lines",
    "read_file",
    "read_folder",
    "suffixes",
    "without_lines",
]
