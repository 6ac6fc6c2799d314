"""What is handed to an inference engine that computes in place of a transformers model."""
