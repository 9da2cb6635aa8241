"""The chain as two Triton kernels: ``stats`` reads the logits once, ``finish`` cuts and draws."""
