"""Loaders of real data that arrive inside installed packages."""
