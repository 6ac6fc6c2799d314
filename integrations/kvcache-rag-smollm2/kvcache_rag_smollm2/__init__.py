"""An adapter of SmolLM2-135M-Instruct that reads stitched chunks: `adapter="block"` of kvcache-rag.

Its files lie in the folder `block`, to which an entry point leads; there is no code.
"""
