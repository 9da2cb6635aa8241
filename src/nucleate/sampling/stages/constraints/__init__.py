"""Constraints: bias, ban or allow tokens."""
