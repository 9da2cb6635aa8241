"""Continuous batching engine: scheduler, KV cache manager, model executor, beam search, speculative decoding."""
