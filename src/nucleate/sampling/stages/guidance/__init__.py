"""Stages that combine the logits of two sequences."""
