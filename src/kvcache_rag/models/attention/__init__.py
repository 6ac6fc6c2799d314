"""Replacements for a model's attention: packed heads, weighted chunks, the last layer."""
