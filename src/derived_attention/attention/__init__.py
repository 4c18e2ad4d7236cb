"""Attention mechanisms: every formula in `formulas`, and a folder a family with the fast forms."""
