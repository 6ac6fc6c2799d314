"""Subcommands of `kvcache-rag` that measure or train."""
