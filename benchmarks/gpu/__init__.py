"""What runs once on a machine with a GPU: kernels against formulas, times, all chapters."""
