"""Scaled heads, Attention-SH (chapter 5)."""
