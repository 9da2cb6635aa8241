"""Beyond one device: sampling where the logits are sharded over ranks."""
