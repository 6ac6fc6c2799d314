"""Chunks on a remote: the same files through fsspec."""
