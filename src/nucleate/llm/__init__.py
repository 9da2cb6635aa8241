"""LLM: text in, text out."""

from nucleate.llm.completions import progress_bar
from nucleate.llm.llm import LLM

__all__ = ["LLM", "progress_bar"]
