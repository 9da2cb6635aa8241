"""Compiled kernels: how they are compiled, cached, loaded and warmed up."""
