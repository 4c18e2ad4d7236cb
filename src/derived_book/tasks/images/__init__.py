"""Images as sequences of patches."""
