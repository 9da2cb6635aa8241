"""The kernels of the NumPy Llama, and their NumPy versions."""
