"""Sampling as torch operations: any pipeline on any device, and the row state that the Triton kernels use.

``batch_state`` has the rows of a sampler, ``batch_sampling`` samples them, and ``triton`` has the kernels for CUDA.
"""
