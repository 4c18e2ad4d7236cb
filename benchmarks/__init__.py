"""Every mechanism of the package beside PyTorch's attention: ``python -m benchmarks``."""
