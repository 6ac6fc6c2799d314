"""Chunks in a folder: one safetensors file each, shared by processes."""
