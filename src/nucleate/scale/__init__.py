"""Beyond one device and one machine: sampling on sharded logits, batches and replicas on Ray."""
