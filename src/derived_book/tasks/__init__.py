"""Tasks: a package for each, with its data, and where pages need them its model and loss."""
