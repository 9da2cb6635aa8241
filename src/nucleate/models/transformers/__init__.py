"""Hugging Face Transformers models."""
