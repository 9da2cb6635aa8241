"""Watermarks: statistical marks in sampled text that a detector with the secret key finds."""
