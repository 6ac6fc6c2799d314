"""Subcommands that this package adds to `kvcache-rag`: demo, ingest, ask."""
