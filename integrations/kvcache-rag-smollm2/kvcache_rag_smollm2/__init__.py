"""An adapter of SmolLM2-135M-Instruct that reads stitched chunks: `adapter="block"` of kvcache-rag.

Its files are in the folder `block`, which an entry point names; there is no code.
"""
