"""Longer runs, recorded for the chapters: one file a chapter, `protocol` runs them."""
