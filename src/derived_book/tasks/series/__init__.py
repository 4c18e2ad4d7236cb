"""Time series and their classes."""
