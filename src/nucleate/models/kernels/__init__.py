"""Compiled kernels of the NumPy models."""
