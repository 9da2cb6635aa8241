"""Readable generation loops, used as test oracles."""
