"""Language: the next byte of a text."""
