"""Batches of requests: reads lines, runs them on an engine and builds the output records."""
