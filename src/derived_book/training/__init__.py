"""Training: `fit`, grids of runs and their workers, recorded results, and measurements."""
