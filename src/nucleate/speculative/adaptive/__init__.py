"""Adaptive speculation length: how many tokens are worth drafting."""
