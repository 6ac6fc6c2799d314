"""Subcommands of `kvcache-rag` that serve, and that prefill a corpus."""
