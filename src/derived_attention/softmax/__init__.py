"""Softmax attention, and two controls without a choice (chapters 1 and 2)."""
