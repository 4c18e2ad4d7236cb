"""Mixtures of Gaussian keys, MGK (chapters 9 and 10)."""
