"""The text of files and folders, as people see it, and what of it could not be put into words.

HTML is parsed by JustHTML, as browsers do; Word becomes HTML by mammoth first; PDF is read by
pypdf, front matter by PyYAML.  The libraries, but for the last, are those of the extra `documents`
of kvcache-rag, imported when a file needs them.
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
