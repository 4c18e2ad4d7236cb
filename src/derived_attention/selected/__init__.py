"""Attention to the blocks of keys that a query selects (chapter 16)."""
