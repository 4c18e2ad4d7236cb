"""Multiresolution heads, MrsFormer (chapter 7)."""
