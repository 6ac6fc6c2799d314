"""From a question to its answer: checked, filled, generated, streamed, explained."""
