"""How an adapter is trained to read stitched chunks, for any model that fine-tuning takes."""
