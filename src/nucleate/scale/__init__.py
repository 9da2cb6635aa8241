"""Beyond one process and one machine: sharded sampling, Ray Data, Ray Serve."""
