"""Ridge and lasso attention by ADMM (chapters 13 and 14)."""
