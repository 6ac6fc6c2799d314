"""Attention of our own in place of a model's: packed heads, weighed chunks, the last layer."""
