"""From answers to something to look at."""
