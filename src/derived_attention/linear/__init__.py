"""Linear attention (chapter 4)."""
