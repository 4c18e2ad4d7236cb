"""What all mechanisms share: calling convention, masks, checks, blocks, poolings and kernels."""
