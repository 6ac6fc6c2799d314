"""llama.cpp as a back end of `kvcache-rag`: GGUF files as they are, contexts in its own cells.

Chunks are kept in files like those of transformers.  Our kernel rotates them while they are written
into a llama.cpp state (`state.py`), which goes into its context (`model.py`).
"""
