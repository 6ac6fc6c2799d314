"""Attention over chunks in place, with their keys rotated inside (LazyAttention)."""
