"""vLLM servers behind this one: it writes prompts and says what is reused, they compute."""
