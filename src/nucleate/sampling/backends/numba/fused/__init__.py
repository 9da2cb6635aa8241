"""The kernel for the usual pipeline: starts at ``fused_sampler``, then ``kernel`` and ``cutoffs``."""
