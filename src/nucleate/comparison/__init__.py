"""Compares sampling settings over prompts and seeds: diversity, likelihood, repetition, length, entropy."""
