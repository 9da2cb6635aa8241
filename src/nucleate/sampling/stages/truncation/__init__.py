"""Truncation: keep the likely tokens only."""
