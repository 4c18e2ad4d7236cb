"""Derived Attention: attention mechanisms derived from five fields, made fast and tested."""

__version__ = "0.1.0"
