"""How well a model answers under different policies, on the same questions."""
