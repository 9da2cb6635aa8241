"""One model on several ranks: sampling on sharded logits, and tensor parallelism."""
