"""Sampling stages for nucleate."""
