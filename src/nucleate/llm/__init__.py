"""LLM: text in, text out."""

from nucleate.llm.llm import LLM
from nucleate.llm.shared_engine import progress_bar

__all__ = ["LLM", "progress_bar"]
