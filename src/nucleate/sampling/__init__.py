"""Logits to a token: stages, pipelines, samplers and their backends."""
