"""Convolutional attention (chapter 6)."""
