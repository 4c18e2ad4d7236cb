"""Compare every mechanism of the package with PyTorch's attention: ``python -m benchmarks``."""
