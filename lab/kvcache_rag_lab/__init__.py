"""Measuring and training: verify, eval, bench, finetune, and the tiny reader's language."""
