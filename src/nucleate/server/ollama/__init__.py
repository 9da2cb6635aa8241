"""Ollama's API for generation: ``/api/chat``, ``/api/generate``, and what clients ask about the model."""
