"""Penalties: lower the scores of tokens that occurred."""
