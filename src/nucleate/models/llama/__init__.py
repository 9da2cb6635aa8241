"""The Llama architecture in NumPy."""
