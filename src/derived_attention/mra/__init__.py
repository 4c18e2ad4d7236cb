"""MRA-2, an approximation by blocks (appendix D)."""
