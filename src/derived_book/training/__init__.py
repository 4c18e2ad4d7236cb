"""Training: one `fit`, grids of runs, a cluster, recorded results, and measures."""
