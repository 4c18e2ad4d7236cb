"""The delta rule and its gated forms (chapter 15)."""
