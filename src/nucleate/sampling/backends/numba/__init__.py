"""The CPU backend, compiled by Numba.

``fused`` is a kernel for the usual pipeline; ``composed`` runs any other one. Both use LLVM vectors (``vector_lanes``,
``block_ops``), the exponential (``float64``), random numbers (``philox``) and access to rows (``row_loading``).
"""
