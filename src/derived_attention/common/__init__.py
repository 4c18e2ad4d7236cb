"""What all mechanisms share: calling convention, masks, checks, and the layer."""
