"""ListOps: nested lists to evaluate."""
