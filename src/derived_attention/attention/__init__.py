"""Attention mechanisms, one module per family, each readable beside its chapter."""
