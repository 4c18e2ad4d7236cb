"""What is learned: a folder a task, with its data, its model and its loss."""
