"""Sampling as torch operations: any pipeline on any device, and the row state that the Triton kernels use."""
