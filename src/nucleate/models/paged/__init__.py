"""The paged KV cache, the layout of a batch, and attention over it on CPU."""
