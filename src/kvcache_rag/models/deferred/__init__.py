"""Attention over chunks where they lie, their keys rotated inside (LazyAttention)."""
