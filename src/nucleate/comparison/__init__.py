"""Compares sampling settings over prompts and seeds: diversity, likelihood, repetition, length, entropy.

Also checks the conformance of servers and samplers.
"""
