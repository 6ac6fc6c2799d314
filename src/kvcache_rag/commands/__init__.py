"""Subcommands that the core brings to `kvcache-rag`, one module each, as `kvcache_rag.cli` says."""
