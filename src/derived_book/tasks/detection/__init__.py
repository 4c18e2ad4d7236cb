"""Detection: boxes in an image."""
