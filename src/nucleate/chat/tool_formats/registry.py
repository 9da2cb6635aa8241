"""The formats of tool calls by name, and the choice of one from a chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from nucleate.chat.tool_formats.deepseek import CALLS as DEEPSEEK_CALLS
from nucleate.chat.tool_formats.deepseek import CODE, DeepSeek
from nucleate.chat.tool_formats.harmony import CHANNEL, MESSAGE, Harmony
from nucleate.chat.tool_formats.hermes import START, Hermes
from nucleate.chat.tool_formats.llama import PYTHON_TAG, Llama
from nucleate.chat.tool_formats.mistral import ARGUMENTS, CALLS, Mistral
from nucleate.chat.tool_formats.plain import Plain
from nucleate.chat.tool_formats.tool_format import ToolFormat

FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": Hermes(),
    "llama3_json": Llama(),
    "mistral": Mistral(lists=True),
    "mistral_v11": Mistral(lists=False),
    "deepseek_v3": DeepSeek(blocks=True),
    "deepseek_v31": DeepSeek(blocks=False),
    "openai": Harmony(),
    "plain": Plain(),
}
"""By the names of vLLM's ``--tool-call-parser``, apart from ``plain`` and ``mistral_v11``."""


def is_harmony(template: str) -> bool:
    """Whether a chat template is that of GPT-OSS."""
    return CHANNEL in template and MESSAGE in template


def find_format(template: str, tokens: Collection[str]) -> str | None:
    """Return the name of the format for a chat template. tokens: the added tokens of the tokenizer.

    None: the template describes tools in a format that is not supported.
    """
    if is_harmony(template):
        return "openai"
    if DEEPSEEK_CALLS in template:
        return "deepseek_v3" if CODE in template else "deepseek_v31"
    if CALLS in template:
        return "mistral_v11" if ARGUMENTS in template or ARGUMENTS in tokens else "mistral"
    if START in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters": ' in template):
        return "llama3_json"
    return None if "tools" in template else "plain"
