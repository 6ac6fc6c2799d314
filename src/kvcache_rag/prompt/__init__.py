"""Text to tokens: how a prompt is written, token ids, and scores between them."""
