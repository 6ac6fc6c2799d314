"""What measures and trains: verify, eval, bench, finetune, and the tiny reader's language."""
