"""The paged KV cache: pool, batch layout, block tables."""
