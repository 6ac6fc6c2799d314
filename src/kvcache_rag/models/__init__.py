"""Models: what is measured about them, and the transformers adapter."""
