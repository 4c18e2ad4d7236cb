"""Softmax attention, with a sink (chapter 16), and three controls (chapter 1)."""
