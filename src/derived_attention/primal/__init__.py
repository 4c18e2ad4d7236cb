"""Kernel singular values, Primal-Attention (chapters 11 and 12)."""
