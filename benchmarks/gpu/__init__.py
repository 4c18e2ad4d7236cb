"""Checks and measurements on a machine with a GPU: kernels, times, and all notebooks."""
