"""Windows, strides and fixed patterns (chapter 4)."""
