"""MRA-2, an approximation by blocks (chapter 8)."""
