"""llama.cpp as the engine of `kvcache-rag`: GGUF files as they are, contexts in its own cells.

Chunks lie in files as those of transformers do.  They are rotated by our kernel while they are
written into a state of llama.cpp's (`state.py`), which goes into its context (`model.py`).
"""
