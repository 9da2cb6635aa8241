"""The fused pipeline as Triton kernels, see ``launch`` for the launches of a step."""
