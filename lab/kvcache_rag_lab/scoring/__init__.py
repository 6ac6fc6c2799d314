"""Ask questions, score the answers, and say how sure the scores are."""
