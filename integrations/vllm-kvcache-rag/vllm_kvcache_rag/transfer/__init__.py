"""What is sent to an inference engine that computes in place of a transformers model."""
