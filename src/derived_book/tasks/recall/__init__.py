"""Associative recall: which value came with a key."""
