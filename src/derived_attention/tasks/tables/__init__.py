"""Tables: a token for each column."""
