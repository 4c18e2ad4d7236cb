"""Control: episodes to act on."""
