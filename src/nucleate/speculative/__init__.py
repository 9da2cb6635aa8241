"""Guesses of what comes next, for the target to verify: n-grams, suffixes, and how many of them pay. Token ids only."""
