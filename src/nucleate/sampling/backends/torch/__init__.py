"""What runs the chain on tensors: Triton kernels (``special``), and plain torch for devices without Triton."""
