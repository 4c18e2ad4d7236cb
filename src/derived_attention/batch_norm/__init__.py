"""Normalised keys, Attention-BN (chapter 5)."""
