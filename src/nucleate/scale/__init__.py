"""Beyond one machine: batches and replicas on Ray; and the public names of sampling on sharded logits."""
