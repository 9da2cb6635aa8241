"""Many requests at once over one model: scheduling, blocks, batches, events. Without I/O; knows no network."""
