"""The CPU backend, compiled by Numba.

``fused_runner`` runs ``fused_kernel``, a kernel for the usual pipeline; ``evaluation`` runs any other pipeline, with
NumPy on the top of the ranking and ``row_kernels``. Both use LLVM vectors and access to rows (``block_ops``), and the
exponential and random numbers (``kernel_maths``).
"""
