"""The core's subcommands of `kvcache-rag`, one module each; see `kvcache_rag.cli`."""
