"""The CPU backend, compiled by Numba.

``fused`` is a hand-written kernel for the most common pipeline; ``composed`` runs any other pipeline. Shared by both:
LLVM vectors (``vector_lanes``, ``block_ops``), the exponential (``float64``), random numbers (``philox``) and access to
rows in memory (``row_loading``).
"""
