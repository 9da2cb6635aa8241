"""Small tokenizers of every family, as fixtures."""

from small_tokenizers import *  # noqa: F403
