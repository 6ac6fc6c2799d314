"""How SmolLM2 was fine-tuned to read stitched chunks, and how that was measured."""
