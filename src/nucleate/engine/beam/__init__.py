"""Beam search inside the engine."""
