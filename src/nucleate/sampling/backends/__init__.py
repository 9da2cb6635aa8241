"""What runs a pipeline. Each backend takes the meaning from the stages and has none of its own."""
